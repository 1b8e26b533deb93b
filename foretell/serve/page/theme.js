// Light or dark: as the system says, unless the reader has chosen.

const KEPT = "foretell.theme";

/** What was chosen before; a browser may forbid to keep anything. */
function kept() {
  try {
    return localStorage.getItem(KEPT) ?? "";
  } catch {
    return "";
  }
}

function keep(theme) {
  try {
    if (theme) localStorage.setItem(KEPT, theme);
    else localStorage.removeItem(KEPT);
  } catch {
    // The choice then holds until the page is closed.
  }
}

function show(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function followTheme(select) {
  select.value = kept();
  show(select.value);
  select.addEventListener("change", () => {
    keep(select.value);
    show(select.value);
  });
}
