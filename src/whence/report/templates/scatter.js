// The picture of all predictions, on a canvas: drawn, pointed at, zoomed, stepped through by keys.
const plot = byId("plot");
const canvas = plot.querySelector("canvas");
const pen = canvas.getContext("2d");
const MARGIN = { left: 66, right: 12, top: 12, bottom: 40 };
const scene = {
  view: { x0: -0.02, x1: 1.02, y0: -0.02, y1: 1.02 },
  shown: [], selected: null, current: -1, hover: -1, box: null, width: 0, height: 0, byX: [], byY: [],
};

const area = () => ({ w: scene.width - MARGIN.left - MARGIN.right, h: scene.height - MARGIN.top - MARGIN.bottom });
const toX = (x) => MARGIN.left + ((x - scene.view.x0) / (scene.view.x1 - scene.view.x0)) * area().w;
const toY = (y) => MARGIN.top + (1 - (y - scene.view.y0) / (scene.view.y1 - scene.view.y0)) * area().h;
const fromX = (px) => scene.view.x0 + ((px - MARGIN.left) / area().w) * (scene.view.x1 - scene.view.x0);
const fromY = (py) => scene.view.y0 + (1 - (py - MARGIN.top) / area().h) * (scene.view.y1 - scene.view.y0);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const outline = (x, y, verdict, size) => {
  if (verdict === 2) {
    const r = size * 1.3;
    pen.moveTo(x, y - r); pen.lineTo(x + r, y); pen.lineTo(x, y + r); pen.lineTo(x - r, y); pen.closePath();
  } else if (verdict === 3) {
    pen.rect(x - size, y - size, 2 * size, 2 * size);
  } else if (verdict === 4) {
    pen.moveTo(x, y - size * 1.2); pen.lineTo(x + size * 1.2, y + size); pen.lineTo(x - size * 1.2, y + size); pen.closePath();
  } else {
    pen.moveTo(x + size, y); pen.arc(x, y, size, 0, 7);
  }
};

// Round numbers between two values: evenly spaced, or 1, 2, 5, 10 and so on.
const evenTicks = (low, high) => {
  const raw = (high - low) / 5, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find((each) => size * each >= raw * 0.999);
  const found = [];
  for (let at = Math.max(0, Math.ceil(low / step - 1e-9)); at * step <= high * (1 + 1e-9); at++) found.push(+(at * step).toPrecision(12));
  return found;
};
const growingTicks = (low, high) => {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const each of [1, 2, 5]) found.push(+(each * 10 ** power).toPrecision(12));
  }
  const inside = found.filter((value) => value >= low && value <= high);
  if (inside.length < 3) return evenTicks(low, high);
  return inside.length <= 8 ? inside : inside.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
};
const tickText = (value) => {
  const [size, letter] = [[1e9, "G"], [1e6, "M"], [1e4, "k"], [1, ""]].find(([least]) => value >= least) ?? [1, ""];
  return size === 1 ? short(value) : `${+(value / (size === 1e4 ? 1e3 : size)).toPrecision(3)}${letter}`;
};

// Draw what has room: no label touches the one before it.
const drawTicks = (ticks, place, room, print) => {
  let last = -Infinity;
  for (const tick of ticks) {
    const at = place(tick), size = room(tick);
    if (at - size / 2 < last + 6) continue;
    print(tick, at);
    last = at + size / 2;
  }
};

const drawAxes = () => {
  const { w, h } = area(), v = scene.view;
  pen.fillStyle = colour("panel"); pen.fillRect(MARGIN.left, MARGIN.top, w, h);
  pen.strokeStyle = colour("line"); pen.lineWidth = 1; pen.strokeRect(MARGIN.left + 0.5, MARGIN.top + 0.5, w - 1, h - 1);
  pen.font = "12px system-ui, sans-serif"; pen.fillStyle = colour("soft");
  const xText = (value) => `${tickText(value)}×`, yText = (value) => (data.classes ? percent(value) : tickText(value));
  pen.textAlign = "center"; pen.textBaseline = "top";
  drawTicks(growingTicks(valueX(v.x0), valueX(v.x1)), (value) => toX(placeX(value)), (value) => pen.measureText(xText(value)).width,
    (value, at) => pen.fillText(xText(value), at, MARGIN.top + h + 5));
  pen.textAlign = "right"; pen.textBaseline = "middle";
  drawTicks(evenTicks(Math.max(0, valueY(v.y0)), valueY(v.y1)).reverse(), (value) => toY(placeY(value)), () => 12,
    (value, at) => pen.fillText(yText(value), MARGIN.left - 5, at));
  pen.fillStyle = colour("ink"); pen.textAlign = "center"; pen.textBaseline = "bottom";
  pen.fillText("scarcity: 1 is ordinary →", MARGIN.left + w / 2, scene.height - 2);
  pen.save(); pen.translate(11, MARGIN.top + h / 2); pen.rotate(-Math.PI / 2); pen.textBaseline = "middle";
  pen.fillText(data.classes ? "noise of the labels nearby →" : "noise: spread of targets nearby →", 0, 0); pen.restore();
};

const drawLimits = () => {
  pen.setLineDash([4, 5]);
  for (const [tone, ax, ay, bx, by] of [
    ["scarcity", placeX(data.scarcityLimit), -1, placeX(data.scarcityLimit), 2],
    ["noise", -1, placeY(data.noiseLimit), 2, placeY(data.noiseLimit)],
  ]) {
    pen.strokeStyle = colour(tone); pen.beginPath(); pen.moveTo(toX(ax), toY(ay)); pen.lineTo(toX(bx), toY(by)); pen.stroke();
  }
  pen.setLineDash([]);
};

const corners = () => {
  const { w } = area();
  pen.font = "13px system-ui, sans-serif"; pen.textBaseline = "alphabetic";
  for (const [tone, text, align, x] of [["noise", "↑ noisy labels", "left", MARGIN.left + 9], ["scarcity", "scarce data →", "right", MARGIN.left + w - 9]]) {
    pen.textAlign = align; pen.lineWidth = 6; pen.strokeStyle = colour("panel"); pen.strokeText(text, x, MARGIN.top + 19); // no dashes behind the words
    pen.fillStyle = colour(tone); pen.fillText(text, x, MARGIN.top + 19);
  }
  pen.lineWidth = 1;
};

const draw = () => {
  if (!scene.width) return;
  const { w, h } = area();
  pen.clearRect(0, 0, scene.width, scene.height);
  drawAxes();
  pen.save(); pen.beginPath(); pen.rect(MARGIN.left, MARGIN.top, w, h); pen.clip();
  drawLimits();
  corners();
  const base = data.m > 3000 ? 2.2 : data.m > 600 ? 3 : 4;
  for (const verdict of TONES.keys()) {
    for (const chosen of scene.selected ? [false, true] : [true]) {
      pen.fillStyle = colour(TONES[verdict]);
      pen.globalAlpha = chosen ? (verdict ? 0.85 : 0.5) : 0.12;
      pen.beginPath();
      for (const i of scene.shown) {
        if (points.verdict[i] !== verdict || (scene.selected && scene.selected.has(i) !== chosen)) continue;
        const x = toX(points.x[i]), y = toY(points.y[i]);
        if (x < 0 || y < 0 || x > scene.width || y > scene.height) continue;
        outline(x, y, verdict, verdict ? base : base * 0.75);
      }
      pen.fill();
    }
  }
  pen.globalAlpha = 1;
  ring(scene.hover, 1.5); ring(scene.current, 2.5);
  if (scene.box) {
    const { ax, ay, bx, by } = scene.box;
    pen.strokeStyle = colour("ink"); pen.setLineDash([3, 3]);
    pen.strokeRect(Math.min(ax, bx), Math.min(ay, by), Math.abs(ax - bx), Math.abs(ay - by));
  }
  pen.restore();
};

const ring = (i, weight) => {
  if (i < 0) return;
  pen.beginPath(); pen.lineWidth = weight; pen.strokeStyle = colour("ink");
  outline(toX(points.x[i]), toY(points.y[i]), points.verdict[i], 7); pen.stroke(); pen.lineWidth = 1;
};

const resize = () => {
  const width = plot.clientWidth, height = Math.round(Math.min(width * 0.95, 560));
  if (!width) return;
  const dense = window.devicePixelRatio || 1;
  Object.assign(scene, { width, height });
  canvas.width = width * dense; canvas.height = height * dense; canvas.style.height = `${height}px`;
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  draw();
};

const nearest = (px, py, reach) => {
  let best = -1, least = reach * reach;
  for (const i of scene.shown) {
    const dx = toX(points.x[i]) - px, dy = toY(points.y[i]) - py;
    const far = dx * dx + dy * dy - (points.verdict[i] ? 4 : 0); // toned marks lie on top
    if (far < least) { least = far; best = i; }
  }
  return best;
};

const setView = (x0, x1, y0, y1) => { scene.view = { x0, x1, y0, y1 }; draw(); };
const whole = () => setView(-0.02, 1.02, -0.02, 1.02);
const zoom = (factor, cx = null, cy = null) => {
  const v = scene.view;
  const x = cx ?? (scene.current >= 0 ? points.x[scene.current] : (v.x0 + v.x1) / 2);
  const y = cy ?? (scene.current >= 0 ? points.y[scene.current] : (v.y0 + v.y1) / 2);
  if ((v.x1 - v.x0) * factor > 1.04) return whole();
  return setView(x - (x - v.x0) * factor, x + (v.x1 - x) * factor, y - (y - v.y0) * factor, y + (v.y1 - y) * factor);
};

const choose = (i) => {
  scene.current = i;
  const v = scene.view, x = points.x[i], y = points.y[i];
  if (x < v.x0 || x > v.x1 || y < v.y0 || y > v.y1) { // step the view along
    const w = (v.x1 - v.x0) / 2, h = (v.y1 - v.y0) / 2;
    setView(x - w, x + w, y - h, y + h);
  }
  inspect(i);
  byId("spoken").textContent = `${idOf(i)}: ${answerText(i)}, ${VERDICTS[points.verdict[i]]}`;
  draw();
};

const select = (chosen) => {
  scene.selected = chosen && chosen.length ? new Set(chosen) : null;
  byId("zoom-selection").hidden = byId("clear-selection").hidden = !scene.selected;
  refresh();
};

const zoomToSelection = () => {
  const chosen = [...scene.selected];
  const [xs, ys] = [chosen.map((i) => points.x[i]), chosen.map((i) => points.y[i])];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const pad = 0.08 * Math.max(x1 - x0, y1 - y0, 0.01);
  setView(x0 - pad, x1 + pad, y0 - pad, y1 + pad);
};
