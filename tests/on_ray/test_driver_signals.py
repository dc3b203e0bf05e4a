"""A signal that raycheck answers by a save still does what it did before."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from raycheck.on_ray.driver_signals import saves_on_signals

said = []

def say(text):
    os.write(1, text.encode() + b"\\n")
    said.append(text)

def handler(number, frame):
    say(f"handled {signal.Signals(number).name}")

def save():
    say("saved")
    return True

def lines_of(what):
    return {"handler": 2, "ignore": 0, "default": 1}[what]

before = dict(zip(("SIGUSR1", "SIGTERM"), sys.argv[1].split(",")))
for name, what in before.items():
    number = getattr(signal, name)
    signal.signal(number, {"handler": handler, "ignore": signal.SIG_IGN, "default": signal.SIG_DFL}[what])
with saves_on_signals(save):
    for name in sys.argv[2].split(","):
        wanted = len(said) + lines_of(before[name])
        os.kill(os.getpid(), getattr(signal, name))
        deadline = time.monotonic() + 50
        while len(said) < wanted or (name, before[name]) == ("SIGTERM", "default"):  # that one ends the process
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
print("over", signal.getsignal(signal.SIGUSR1), flush=True)
"""


def told(before: str, signals: str) -> tuple[int, list[str]]:
    """Runs SCRIPT, and returns its exit code and the lines it wrote. before: what SIGUSR1 and SIGTERM do."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, before, signals], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, [line for line in done.stdout.splitlines() if not line.startswith("over")]


@pytest.mark.parametrize(
    ("before", "signals", "code", "lines"),
    [
        ("default,default", "SIGUSR1,SIGUSR1", 0, ["saved", "saved"]),
        ("default,default", "SIGTERM", -signal.SIGTERM, ["saved"]),
        (
            "default,handler",
            "SIGTERM,SIGUSR1,SIGTERM",
            0,
            ["saved", "handled SIGTERM", "saved", "saved", "handled SIGTERM"],
        ),
        ("default,ignore", "SIGTERM,SIGUSR1", 0, ["saved"]),
    ],
)
def test_a_signal_is_answered_by_a_save_and_then_does_what_it_did(
    before: str, signals: str, code: int, lines: list[str]
) -> None:
    assert told(before, signals) == (code, lines)


def test_a_handler_of_the_user_s_is_called_too() -> None:
    code, lines = told("handler,default", "SIGUSR1")

    assert code == 0
    assert sorted(lines) == ["handled SIGUSR1", "saved"]
