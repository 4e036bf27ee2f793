// Measures the page of a report and zooms its first chart: the body of a function, for `measure`.
const boxOf = (element) => {
  const { left, right, top, bottom } = element.getBoundingClientRect();
  return { text: element.textContent, left, right, top, bottom };
};
const boxes = (selector, root = document) => [...root.querySelectorAll(selector)].map(boxOf);
const sizes = (selector) =>
  boxes(selector).map(({ left, right, top, bottom }) => [right - left, bottom - top]);
const touch = (one, other) =>
  one.left < other.right - 0.5 && other.left < one.right - 0.5 &&
  one.top < other.bottom - 0.5 && other.top < one.bottom - 0.5;

// Texts that lie on one another, beyond their chart, or on a bar.
const overlaps = [];
const compare = (texts, others) => {
  for (const one of texts)
    for (const other of others) if (touch(one, other)) overlaps.push([one.text, other.text]);
};
const plots = [...document.querySelectorAll("svg.plot")];
for (const each of plots) {
  const frame = boxOf(each), texts = boxes("text", each);
  texts.forEach((one, place) => compare([one], texts.slice(place + 1)));
  const beyond = texts.filter(({ left, right }) => left < frame.left - 1 || right > frame.right + 1);
  overlaps.push(...beyond.map(({ text }) => [text, "the edge"]));
}
for (const bar of document.querySelectorAll(".bar")) {
  const [name, value] = boxes(".bar-text > *", bar);
  compare([name], [value]);
  compare([name, value], boxes(".track", bar));
}

const chart = document.querySelector('[data-chart="over-steps"]');
const plot = chart.querySelector("svg.plot");
const state = () => ({
  labels: [...plot.querySelectorAll("text")].map((text) => text.textContent),
  marks: plot.querySelectorAll("use").length,
  line: plot.querySelector(".c-line").getAttribute("d").length,
});
const press = (label) => {
  chart.querySelector(`[aria-label="${label}"]`).click();
  return state();
};
const point = (type, share, buttons) => {
  const { left, width, top } = plot.getBoundingClientRect();
  const place = { clientX: left + share * width, clientY: top + 90 };
  plot.dispatchEvent(new PointerEvent(type, { ...place, buttons, bubbles: true }));
};
const drag = (from, to) => {
  point("pointerdown", from, 1);
  point("pointermove", to, 1);
  point("pointerup", to, 0);
  return state();
};

const found = {
  hostile: window.hostile ?? null,
  width: innerWidth,
  scroll: document.documentElement.scrollWidth,
  overlaps,
  plots: sizes("svg.plot"),
  drawn: plots.map((each) => each.querySelectorAll("path.trace, path.bars").length),
  bars: sizes(".track .fill"),
  hidden: boxes("td").filter(({ left, right }) => left < 0 || right > innerWidth + 1).length,
  heads: [...document.querySelectorAll("td")].map((cell) => getComputedStyle(cell, "::before").content),
  paper: getComputedStyle(document.body).backgroundColor,
  whole: state(),
  dragged: drag(0.6, 0.7),
};
point("pointermove", 0.5, 0);
found.told = chart.querySelector("output").textContent;
found.all = press("show all");
found.nearer = press("zoom in");
found.right = press("move right");
found.farther = press("zoom out");
return found;
