// The page's behavior beyond links and forms: filtering a table, and updating the view of a live run.
const POLL_MS = 5000;

for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = document.querySelectorAll(`#${input.dataset.filter} tbody tr`);
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

// Finds elements that also exist in an older version of the page, so that the focus can be restored.
const FOCUSABLE = ["a[href]", "button", "input", "select", "summary", "[tabindex]"].map((kind) => `main ${kind}`).join();
const equalTo = (element) => {
  const told = (item) => item.tagName + (item.getAttribute("href") ?? item.getAttribute("aria-label") ?? item.textContent);
  return [...document.querySelectorAll(FOCUSABLE)].filter((item) => told(item) === told(element));
};

const live = document.getElementById("live");
if (live) {
  const ask = async () => {
    if (document.hidden) return;
    const answer = await fetch(`live?${new URLSearchParams({ name: live.dataset.name })}`).catch(() => null);
    if (!answer || !answer.ok) return;
    const { version } = await answer.json();
    if (String(version) === live.dataset.version) return;
    const page = await fetch(location.href);
    if (!page.ok) return;
    const fresh = new DOMParser().parseFromString(await page.text(), "text/html");
    const focused = document.activeElement?.closest("main *");
    const number = focused ? equalTo(focused).indexOf(focused) : -1;
    const place = window.scrollY;
    document.getElementById("main").replaceChildren(...fresh.getElementById("main").childNodes);
    if (number >= 0) equalTo(focused)[number]?.focus({ preventScroll: true });
    const now = document.getElementById("live");
    Object.assign(live.dataset, { version: now.dataset.version });
    window.scrollTo(0, place);
  };
  setInterval(ask, POLL_MS);
}

// An action: the page asks for confirmation, and its button sends it once. The header proves that it comes from this page.
const outcome = document.getElementById("outcome");
for (const form of document.querySelectorAll("form[data-act]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    outcome.textContent = "...";
    const say = (found) => {
      outcome.textContent = found.error ?? found.text;
      outcome.className = found.error || found.has_failed ? "error" : "";
    };
    const ask = async (path, more) => {
      const answer = await fetch(path, more).catch(() => null);
      if (answer === null) return { error: "no answer; check the run to see whether it was done" };
      return answer.json().catch(() => ({ error: `the page refused it (${answer.status}); reload its address` }));
    };
    let found = await ask("act", {
      method: "POST", headers: { "X-Raycheck-Act": "1" }, body: new URLSearchParams(new FormData(form)),
    });
    const { id } = found;
    while (id && !found.is_done && !found.error) {
      found = await ask(`progress?${new URLSearchParams({ id })}`);
      say(found);
      if (!found.is_done) await new Promise((go) => setTimeout(go, 500));
    }
    say(found);
    if (found.error) button.disabled = false;
  });
}
