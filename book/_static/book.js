/* What was folded may be wider than its place once it is opened. The theme makes such places reachable by keyboard
   when the window's size changes; here it is told to look again. */
document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);
