// Bring the page to life.
for (const id of ["filters", "mapgrid", "table-box"]) byId(id).hidden = false;
headTable();
pointers();
plot.addEventListener("keydown", keys);
filters.addEventListener("change", refresh);
filters.addEventListener("submit", (event) => event.preventDefault());
byId("show-all").addEventListener("click", () => { filters.reset(); select(null); whole(); });
byId("zoom-in").addEventListener("click", () => zoom(0.6));
byId("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
byId("zoom-reset").addEventListener("click", whole);
byId("zoom-selection").addEventListener("click", zoomToSelection);
byId("clear-selection").addEventListener("click", () => { select(null); plot.focus(); });
byId("window").addEventListener("click", (event) => { if (event.target === byId("window")) byId("window").close(); });
for (const button of document.querySelectorAll("button.open")) {
  button.hidden = false;
  button.addEventListener("click", () => { choose(Number(button.dataset.prediction)); openWindow(Number(button.dataset.prediction)); });
}
new ResizeObserver(resize).observe(plot);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const moment of ["beforeprint", "afterprint"]) window.addEventListener(moment, draw);
refresh();
resize();
// Begin with the prediction that needs a look most: the highest HeC3 among those that are uncertain.
const byVariance = [...scene.shown].sort((a, b) => points.hec3[b] - points.hec3[a]);
const first = byVariance.find((i) => points.verdict[i] && tracedAt.has(i)) ?? byVariance[0];
if (first !== undefined) choose(first);
