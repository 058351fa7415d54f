// The same predictions as a table: sorted by any column, a page at a time.
const PAGE = 25;
const listing = { rows: [], page: 0, by: "hec3", down: true };

const COLUMNS = [
  ["prediction", "Prediction", (i) => i, idOf],
  ["answer", "Predicted", (i) => (numbers ? points.mean[i * width] : points.answer[i * width]), answerText],
  ...(points.truth ? [["truth", numbers ? "Observed" : "Truly", (i) => points.truth[i * width], targetText]] : []),
  ...(numbers ? [] : [["confidence", "Belief", (i) => points.confidence[i], (i) => percent(points.confidence[i])]]),
  ["noise", "Noise", (i) => points.noise[i], (i) => (data.classes ? percent(points.noise[i]) : short(points.noise[i]))],
  ["scarcity", "Scarcity", (i) => points.scarcity[i], (i) => short(points.scarcity[i])],
  ["ho", "Ho", (i) => points.ho[i], (i) => short(points.ho[i])],
  ["hec3", "HeC3", (i) => points.hec3[i], (i) => short(points.hec3[i])],
  ["ratio", "HeC3/Ho", ratio, (i) => short(ratio(i), 2)],
  ["verdict", "Verdict", (i) => points.verdict[i], (i) => VERDICTS[points.verdict[i]]],
];

const fillTable = (rows) => {
  listing.rows = rows;
  listing.page = 0;
  sortTable();
};

const sortTable = () => {
  const value = COLUMNS.find(([name]) => name === listing.by)[2];
  const sign = listing.down ? -1 : 1;
  listing.rows = [...listing.rows].sort((a, b) => sign * (value(a) - value(b)) || a - b);
  drawTable();
};

const drawTable = () => {
  if (!byId("table-box").open) return;
  const start = listing.page * PAGE;
  const rows = listing.rows.slice(start, start + PAGE).map((i) => make("tr", {},
    ...COLUMNS.map(([name, , , text], column) => (column === 0
      ? make("th", { scope: "row" }, make("button", { type: "button", class: "link", click: () => { choose(i); openWindow(i); } }, text(i)))
      : make("td", {}, name === "verdict" ? markElement(points.verdict[i]) : null, ` ${text(i)}`)))));
  byId("points").tBodies[0].replaceChildren(...rows);
  for (const head of byId("points").tHead.rows[0].cells) {
    head.setAttribute("aria-sort", head.dataset.name === listing.by ? (listing.down ? "descending" : "ascending") : "none");
  }
  const last = Math.min(start + PAGE, listing.rows.length);
  byId("page-count").textContent = listing.rows.length ? `${count(start + 1)} to ${count(last)} of ${count(listing.rows.length)}` : "none";
  byId("page-back").disabled = listing.page === 0;
  byId("page-next").disabled = last >= listing.rows.length;
};

const headTable = () => {
  byId("points").tHead.replaceChildren(make("tr", {}, ...COLUMNS.map(([name, title]) => make("th", { scope: "col", "data-name": name },
    make("button", { type: "button", class: "sort", click: () => {
      listing.down = listing.by === name ? !listing.down : true;
      listing.by = name;
      listing.page = 0;
      sortTable();
    } }, title)))));
  byId("page-back").addEventListener("click", () => { listing.page -= 1; drawTable(); });
  byId("page-next").addEventListener("click", () => { listing.page += 1; drawTable(); });
  byId("table-box").addEventListener("toggle", drawTable);
};
