/* What was folded may be wider than its place once it is opened. The theme makes such places reachable by keyboard
   when the window's size changes; here it is told to look again. */
document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);

/* A mean with its deviation, a range, a power of ten: one line each, in whatever table. */
const WHOLE = /[^\s,]+ (?:±|to) [^\s,]+|[^\s(]*\de-\d+[^\s]*|[\d.]+-[\d.]+%?/g;

for (const cell of document.querySelectorAll("article table.dataframe td")) {
  if (cell.children.length === 0) cell.innerHTML = cell.innerHTML.replace(WHOLE, '<span class="whole">$&</span>');
}

/* Tables that scroll sideways show where there is more. */
const WIDE = ".pst-scrollable-table-container, div.cell_output .output, .explorer-scroll";

function showWhereTablesGoOn() {
  for (const place of document.querySelectorAll(WIDE)) {
    const left = place.scrollWidth - place.clientWidth - place.scrollLeft;
    place.classList.toggle("goes-on", left > 2 && place.querySelector("table") !== null);
  }
}

window.addEventListener("load", showWhereTablesGoOn);
window.addEventListener("resize", showWhereTablesGoOn);
document.addEventListener("scroll", showWhereTablesGoOn, { capture: true, passive: true });
showWhereTablesGoOn();
