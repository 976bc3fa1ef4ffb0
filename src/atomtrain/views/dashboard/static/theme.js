// The theme: the system's, light or dark. Charts are told by the event `theme`.

import { setText } from "./format.js";

const ORDER = ["system", "light", "dark"];

export function themes(button) {
  let chosen = localStorage.getItem("theme") ?? "system";
  const tell = () => dispatchEvent(new Event("theme"));
  const apply = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    setText(button, `Theme: ${chosen}`);
    tell();
  };
  button.addEventListener("click", () => {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    localStorage.setItem("theme", chosen);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  apply();
}
