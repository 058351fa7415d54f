// Elements are made from text alone: nothing that is shown is ever read as HTML.
const byId = (id) => document.getElementById(id);

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "click") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
};

const SHAPES = [
  ["circle", { r: 3 }], ["circle", { r: 4.8 }], ["path", { d: "M0-5.6L5.6 0L0 5.6L-5.6 0Z" }],
  ["rect", { x: -4.3, y: -4.3, width: 8.6, height: 8.6 }], ["path", { d: "M0-5.4L5.4 4.6L-5.4 4.6Z" }],
];
const markElement = (verdict) => {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  const attributes = { class: `mark ${TONES[verdict]}`, viewBox: "-6 -6 12 12", width: 13, height: 13, "aria-hidden": "true" };
  for (const [name, value] of Object.entries(attributes)) picture.setAttribute(name, value);
  const [tag, sizes] = SHAPES[verdict];
  const shape = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(sizes)) shape.setAttribute(name, value);
  picture.append(shape);
  return picture;
};

// The input itself: an image, a text with marked words, or the cells of a row that are furthest from the ordinary; the
// others, where they are wanted, on demand.
const inputElement = (shown, id, most, rest = false) => {
  if (shown === null || shown === undefined) return null;
  if (data.form === "image") return make("img", { src: shown, alt: `Picture of ${id}` });
  if (data.form === "text") {
    const pieces = shown.map(([text, weight]) => (weight ? make("mark", { class: `w${Math.ceil(weight * 4)}` }, text) : text));
    return make("blockquote", { class: "text" }, ...pieces);
  }
  const [cells, unusual, first] = shown;
  const reasons = new Map(unusual);
  const order = [...new Set([...first, ...cells.keys()])];
  const list = (places) => make("dl", { class: "cells" }, ...places.map((place) => make("div", { class: reasons.has(place) ? "odd" : null },
    make("dt", {}, data.columns[place]),
    make("dd", {}, cells[place], reasons.has(place) ? make("small", {}, reasons.get(place)) : null))));
  if (!rest || order.length <= most) return list(order.slice(0, most));
  return make("div", {}, list(order.slice(0, most)),
    make("details", {}, make("summary", {}, `${order.length - most} more columns`), list(order.slice(most))));
};
