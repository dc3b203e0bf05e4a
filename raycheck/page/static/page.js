// What the page does beyond links and forms: it filters a table, and shows a live run's news.
const POLL_MS = 5000;

for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = document.querySelectorAll(`#${input.dataset.filter} tbody tr`);
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

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
    const place = document.activeElement && document.activeElement.closest("main") ? null : window.scrollY;
    document.getElementById("main").replaceChildren(...fresh.getElementById("main").childNodes);
    const now = document.getElementById("live");
    Object.assign(live.dataset, { version: now.dataset.version });
    if (place !== null) window.scrollTo(0, place);
  };
  setInterval(ask, POLL_MS);
}
