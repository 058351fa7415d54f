// The data of the page. Arrays of numbers are packed, all else is plain JSON.
const data = JSON.parse(document.getElementById("data").textContent);

const unpack = (text, Kind) => {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
};
const has = (name) => name in data.arrays;
const floats = (name) => (has(name) ? unpack(data.arrays[name], Float32Array) : null);
const ints = (name) => (has(name) ? unpack(data.arrays[name], Int32Array) : null);
const octets = (name) => (has(name) ? unpack(data.arrays[name], Uint8Array) : null);

const numbers = data.kind === "regression";
const answers = data.kind === "multilabel";
const points = {
  ho: floats("ho"), hec3: floats("hec3"), noise: floats("noise"), scarcity: floats("scarcity"), probability: floats("probability"),
  scarcityP: floats("scarcityP"), verdict: octets("verdict"), undecided: octets("undecided"), right: octets("right"),
  mean: floats("mean"), half: floats("half"), wide: floats("wide"), confidence: floats("confidence"),
  answer: answers ? octets("answer") : ints("answer"),
  truth: numbers ? floats("truth") : answers ? octets("truth") : ints("truth"),
};
const width = numbers ? points.mean.length / data.m : answers ? points.answer.length / data.m : 1;
const tracedAt = new Map(data.traced.map((prediction, place) => [prediction, place]));

const VERDICTS = ["confident", "noisy labels nearby", "scarce data", "both", "check the input"];
const TONES = ["plain", "noise", "scarcity", "both", "input"];

// Places in the picture, from 0 to 1: scarcity on a logarithmic scale from left to right, noise from bottom to top.
const finite = (values, more) => [...[...values].filter(Number.isFinite), more];
const largest = (values) => values.reduce((a, b) => Math.max(a, b));
const scarcities = finite(points.scarcity, data.scarcityLimit).filter((value) => value > 0);
const X = { low: Math.log(Math.min(1, scarcities.reduce((a, b) => Math.min(a, b)))), high: Math.log(1.1 * largest(scarcities)) };
const Y = { high: 1.1 * largest(finite(points.noise, data.noiseLimit)) || 1 };
const within = (value) => (Number.isNaN(value) ? 0 : Math.min(1, Math.max(0, value)));
const placeX = (scarcity) => within((Math.log(scarcity) - X.low) / (X.high - X.low));
const placeY = (noise) => within(noise / Y.high);
const valueX = (x) => Math.exp(X.low + x * (X.high - X.low));
const valueY = (y) => y * Y.high;
points.x = Float32Array.from(points.scarcity, placeX);
points.y = Float32Array.from(points.noise, placeY);
const ratio = (i) => (points.ho[i] > 0 ? points.hec3[i] / points.ho[i] : 1);

const short = (value, digits = 3) => {
  if (Number.isNaN(value)) return "unknown";
  const size = Math.abs(value);
  if (size >= 999.5 && size < 1e9) return Math.round(value).toLocaleString("en"); // an amount, in full
  return size !== 0 && (size < 1e-3 || size >= 1e9) ? value.toExponential(digits - 1) : String(+value.toPrecision(digits));
};
const percent = (share) => (share <= 0 ? "0\u00a0%" : share < 0.001 ? "under 0.1\u00a0%" : `${+(100 * share).toPrecision(share < 0.1 ? 2 : 3)}\u00a0%`);
const count = (value) => value.toLocaleString("en");
const idOf = (i) => (data.ids ? data.ids[i] : `prediction ${count(i)}`);

// What was predicted, and the target, as text.
const answerText = (i) => {
  if (numbers) return outputsOf(i).map(([name, , text]) => (width > 1 ? `${name} ${text}` : text)).join(", ");
  if (answers) return positiveNames(points.answer, i);
  return data.names[points.answer[i]];
};
const targetText = (i) => {
  if (!points.truth) return "";
  if (numbers) return Array.from({ length: width }, (_, k) => short(points.truth[i * width + k])).join(", ");
  if (answers) return positiveNames(points.truth, i);
  return points.truth[i] < 0 ? "unknown" : data.names[points.truth[i]];
};
const positiveNames = (from, i) => {
  const yes = data.names.filter((_, k) => from[i * width + k] === 1);
  return yes.length ? yes.join(", ") : "none";
};
const outputsOf = (i) => Array.from({ length: width }, (_, k) => {
  const at = i * width + k;
  return [data.names[k], at, short(points.mean[at], 4)];
});
