// One prediction: the input, the answer with its range, the verdict, and the training examples behind it.
const reasons = (i) => {
  const found = points.noise[i];
  const shown = (value) => (data.classes ? percent(value) : short(value, 2));
  const around = data.classes ? "labels of inputs like this one contradict each other" : "targets of inputs like this one vary";
  const noise = `Its noise, how much ${around}, is ${shown(found)}; noisy from ${shown(data.noiseLimit)} on.`;
  const some = points.scarcityP[i] < 0.5 ? `${points.scarcityP[i] < 0.001 ? "" : "at most "}${percent(points.scarcityP[i])} of` : "most";
  const so = points.undecided[i] && points.scarcity[i] <= data.scarcityLimit ? "answered as ambiguously" : "as unusual";
  const scarcity = `Its scarcity is ${short(points.scarcity[i], 2)} (1 is ordinary); ${some} ordinary training examples are ${so}.`;
  const undecided = points.undecided[i] ? [`The model itself is undecided: it gives its answer a probability of ${percent(points.probability[i])}.`] : [];
  return [noise, scarcity, ...undecided];
};

const ADVICE = [
  "Nothing unusual.",
  "Check the labels listed under “labels to check”.",
  "Collect and label more inputs like this one.",
  "Check the labels listed, and collect more inputs like this one.",
  "Check the input: what the model says about it means nothing.",
];
const FIRST_CAUSES = data.form === "image" ? 6 : 3;

const rangeElement = (i) => {
  if (numbers) {
    return make("dl", { class: "pairs" }, ...outputsOf(i).flatMap(([name, at, text]) => [
      make("dt", {}, name),
      make("dd", {}, make("b", {}, text), ` ± ${short(points.half[at], 2)} `, make("small", {}, "95 % range of the mean")),
      make("dt", {}, "new observation"),
      make("dd", {}, `${short(points.mean[at] - points.wide[at])} to ${short(points.mean[at] + points.wide[at])}`),
      ...(points.truth ? [make("dt", {}, "observed"), make("dd", {}, short(points.truth[at], 4))] : []),
    ]));
  }
  const place = tracedAt.get(i);
  const half = place === undefined || Number.isNaN(points.half[place]) ? null : points.half[place];
  const belief = points.confidence[i];
  const range = half === null ? "" : `, ${percent(Math.max(0, belief - half))} to ${percent(Math.min(1, belief + half))}`;
  return make("dl", { class: "pairs" },
    make("dt", {}, "predicted"), make("dd", {}, make("b", {}, answerText(i))),
    make("dt", {}, answers ? "least sure" : "probability"),
    make("dd", {}, `${percent(belief)}`, make("small", {}, range ? `${range} (95 %)` : "")),
    ...(points.truth ? [make("dt", {}, "truly"), make("dd", {}, targetText(i), " ", outcomeElement(i))] : []));
};

const outcomeElement = (i) => {
  if (!points.right || points.right[i] === 2) return "";
  if (numbers) return points.right[i] ? "inside" : "outside";
  return make("span", { class: points.right[i] ? "yes" : "no" }, points.right[i] ? "✓ right" : "✗ wrong");
};

const exampleList = (pairs, title, hint) => make("div", { class: "causes" },
  make("h4", {}, title), make("p", { class: "aside" }, hint),
  causeList(pairs.slice(0, FIRST_CAUSES)),
  pairs.length > FIRST_CAUSES ? make("details", {}, make("summary", {}, `${pairs.length - FIRST_CAUSES} more`), causeList(pairs.slice(FIRST_CAUSES))) : null);

const causeList = (pairs) => make("ol", { class: data.form }, ...pairs.map(([example, share]) => {
  const [label, others, doubt, contradicted, shown, id] = data.train[example];
  return make("li", { class: contradicted ? "doubted" : null },
    inputElement(shown, id, 6),
    make("span", { class: "label" }, make("b", {}, label), contradicted ? ` — others say ${others}` : ""),
    make("small", {}, `${id}, ${percent(share)}`, contradicted ? `; ${doubt}` : ""));
}));

const detail = (i, headingId) => {
  const verdict = points.verdict[i];
  const place = tracedAt.get(i);
  const examples = place === undefined
    ? [make("p", { class: "aside" }, "This prediction was not traced to training examples.")]
    : [
        verdict === 2 || verdict === 4 ? null : exampleList(data.check[place], "Labels to check", "Training examples with the largest shares of HeC3."),
        verdict === 2 || verdict === 3 ? exampleList(data.near[place], "Nearest examples", "Training examples with the largest shares of Ho: what the prediction rests on.") : null,
      ];
  return make("article", { class: `detail ${TONES[verdict]}` },
    make("h3", { id: headingId }, idOf(i)),
    make("p", { class: "verdict" }, markElement(verdict), ` ${VERDICTS[verdict]}`),
    i in data.impossible ? make("p", {}, make("b", {}, `${data.impossible[i]}.`)) : null,
    inputElement(data.test[i], idOf(i), 8, true),
    rangeElement(i),
    make("p", {}, ...reasons(i).map((reason) => make("span", {}, `${reason} `)), make("b", {}, ADVICE[verdict])),
    make("details", {}, make("summary", {}, numbers || !data.logits ? "Variances of the prediction" : "Variances of the logits"),
      make("dl", { class: "pairs small" },
        make("dt", {}, "Ho"), make("dd", {}, short(points.ho[i])),
        make("dt", {}, "HeC3"), make("dd", {}, short(points.hec3[i])),
        make("dt", {}, "HeC3/Ho"), make("dd", {}, short(ratio(i), 2)))),
    ...examples);
};

const inspect = (i) => byId("inspector").replaceChildren(detail(i, "inspector-title"));

const openWindow = (i) => {
  const close = make("button", { type: "button", class: "close", "aria-label": "Close", click: () => byId("window").close() }, "×");
  byId("window-body").replaceChildren(close, detail(i, "window-title"));
  byId("window").showModal();
  byId("window").scrollTop = 0;
};
