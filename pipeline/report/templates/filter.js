(() => {
  "use strict";
  const box = document.getElementById("filter");
  if (!box) return;
  const entries = [...document.querySelectorAll(".gallery .sample")];
  const texts = entries.map((entry) => entry.textContent.toLowerCase());
  const parts = [...document.querySelectorAll(".gallery section")];
  const more = document.querySelector(".gallery details");
  const told = document.getElementById("found");
  const wasOpen = () => more && more.open;
  let before = false;
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let number = 0;
    entries.forEach((entry, i) => {
      const shown = words.every((word) => texts[i].includes(word));
      entry.hidden = !shown;
      number += shown;
    });
    for (const part of parts) part.hidden = !part.querySelector(".sample:not([hidden])");
    if (more && words.length && !box.dataset.on) before = wasOpen();
    if (more) more.open = words.length ? true : box.dataset.on ? before : more.open;
    box.dataset.on = words.length ? "1" : "";
    told.textContent = words.length ? `${number} of ${entries.length} prompts` : "";
  };
  box.closest(".filter").hidden = false;
  box.addEventListener("input", filter);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      box.value = "";
      filter();
    }
  });
})();
