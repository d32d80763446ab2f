// The button for light and dark; drawings take their colours anew.

function themeButton(redraw) {
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => (dark() ? "Light" : "Dark");
  const button = make("button", {
    type: "button", id: "theme",
    onclick: () => {
      document.documentElement.dataset.theme = dark() ? "light" : "dark";
      button.textContent = name();
      redraw();
      dispatchEvent(new Event("resize"));
    },
  }, name());
  return button;
}
