"""A signal that raycheck answers by a save still does what it did before."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from raycheck.train.driver_signals import saves_on_signals

def handler(number, frame):
    os.write(1, f"handled {signal.Signals(number).name}\\n".encode())

def save():
    os.write(1, b"saved\\n")
    return True

for name, what in zip(("SIGUSR1", "SIGTERM"), sys.argv[1].split(",")):
    number = getattr(signal, name)
    signal.signal(number, {"handler": handler, "ignore": signal.SIG_IGN, "default": signal.SIG_DFL}[what])
with saves_on_signals(save):
    for name in sys.argv[2].split(","):
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.3)
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
        ("default,ignore", "SIGTERM", 0, []),
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
