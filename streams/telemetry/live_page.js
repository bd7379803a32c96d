"use strict";
(() => {
  const INTERVAL_MS = 2000, TIMEOUT_MS = 5000;
  const lost = document.getElementById("lost");
  let timer, fetching = false, answeredAt = new Date();

  // The page itself is fetched again, so that only the worker knows how a figure is written.
  async function refresh() {
    if (fetching) return;
    fetching = true;
    clearTimeout(timer);
    try {
      const response = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      // Another release's page, or a proxy's.
      if (fresh.querySelector("style")?.textContent !== document.querySelector("style").textContent) {
        return location.reload();
      }
      document.title = fresh.title;
      for (const part of fresh.querySelectorAll("[data-live]")) {
        const shown = document.getElementById(part.id);
        // Only what has changed, so that a selection stays, and a screen reader reads no more than a new state.
        if (shown.innerHTML !== part.innerHTML) shown.replaceChildren(...part.childNodes);
      }
      answeredAt = new Date();
      lost.hidden = true;
    } catch {
      if (lost.hidden) {
        lost.textContent = `No answer since ${answeredAt.toLocaleTimeString()}. All figures are from then.`;
        lost.hidden = false;
      }
    }
    fetching = false;
    document.body.classList.toggle("lost", !lost.hidden);
    if (!document.hidden) timer = setTimeout(refresh, INTERVAL_MS);
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  timer = setTimeout(refresh, INTERVAL_MS);
})();
