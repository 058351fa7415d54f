// Which predictions are shown: by source, class, right or wrong, and by what was selected in the picture.
const filters = byId("filters");

const passing = () => {
  const form = new FormData(filters);
  const verdicts = new Set(form.getAll("verdict").map(Number));
  const wanted = (name) => { const value = form.get(name); return value === null || value === "" ? null : Number(value); };
  const [answer, truth, right] = [wanted("answer"), wanted("truth"), wanted("right")];
  const found = [];
  for (let i = 0; i < data.m; i++) {
    if (!verdicts.has(points.verdict[i])) continue;
    if (answer !== null && points.answer[i] !== answer) continue;
    if (truth !== null && points.truth[i] !== truth) continue;
    if (right !== null && points.right[i] !== right) continue;
    found.push(i);
  }
  return found;
};

const refresh = () => {
  scene.shown = passing();
  scene.byX = [...scene.shown].sort((a, b) => points.x[a] - points.x[b]);
  scene.byY = [...scene.shown].sort((a, b) => points.y[a] - points.y[b]);
  const listed = scene.selected ? scene.shown.filter((i) => scene.selected.has(i)) : scene.shown;
  byId("count").textContent = scene.selected
    ? `${count(listed.length)} selected of ${count(scene.shown.length)} shown`
    : `${count(scene.shown.length)} of ${count(data.m)} shown`;
  draw();
  fillTable(listed);
};

const step = (order, by) => {
  if (!order.length) return;
  const at = order.indexOf(scene.current);
  choose(order[at < 0 ? (by > 0 ? 0 : order.length - 1) : Math.min(order.length - 1, Math.max(0, at + by))]);
};

const keys = (event) => {
  const acts = {
    ArrowRight: () => step(scene.byX, 1), ArrowLeft: () => step(scene.byX, -1),
    ArrowUp: () => step(scene.byY, 1), ArrowDown: () => step(scene.byY, -1),
    Enter: () => scene.current >= 0 && openWindow(scene.current),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: whole,
    Escape: () => { select(null); },
  };
  if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  acts[event.key]();
};

const place = (event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

const pointers = () => {
  let start = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = place(event);
    if (event.pointerType === "mouse") plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (start && event.pointerType === "mouse" && Math.hypot(x - start[0], y - start[1]) > 5) {
      scene.box = { ax: start[0], ay: start[1], bx: x, by: y };
      draw();
    } else if (!start) {
      point(x, y);
    }
  });
  plot.addEventListener("pointerup", (event) => {
    const [x, y] = place(event);
    const box = scene.box;
    const tapped = start && Math.hypot(x - start[0], y - start[1]) <= 8;
    start = scene.box = null;
    if (box) {
      const [x0, x1] = [fromX(Math.min(box.ax, x)), fromX(Math.max(box.ax, x))];
      const [y0, y1] = [fromY(Math.max(box.ay, y)), fromY(Math.min(box.ay, y))];
      select(scene.shown.filter((i) => points.x[i] >= x0 && points.x[i] <= x1 && points.y[i] >= y0 && points.y[i] <= y1));
    } else if (tapped) {
      const i = nearest(x, y, event.pointerType === "mouse" ? 12 : 24);
      if (i >= 0) choose(i);
    }
  });
  plot.addEventListener("pointercancel", () => { start = scene.box = null; draw(); });
  plot.addEventListener("pointerleave", () => { point(-99, -99); });
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // the wheel alone scrolls the page; with Ctrl, or pinched, it zooms
    event.preventDefault();
    const [x, y] = place(event);
    zoom(event.deltaY < 0 ? 0.85 : 1 / 0.85, fromX(x), fromY(y));
  }, { passive: false });
};

const point = (x, y) => {
  const i = nearest(x, y, 12);
  if (i === scene.hover) return;
  scene.hover = i;
  const tip = byId("tip");
  tip.hidden = i < 0;
  if (i >= 0) {
    tip.textContent = `${idOf(i)}: ${answerText(i)}, ${VERDICTS[points.verdict[i]]}`;
    const left = toX(points.x[i]), top = toY(points.y[i]);
    tip.style.left = `${Math.min(left + 12, scene.width - 190)}px`;
    tip.style.top = `${top > 60 ? top - 44 : top + 16}px`;
  }
  draw();
};
