"use strict";
// Draws the charts from the data in the page, as wide as the page is, and zooms along their x axis.
(() => {
  const SVG = document.querySelector(".sprite").namespaceURI;
  const HEIGHT = 250, TOP = 24, RIGHT = 14, BOTTOM = 42, CHARACTER = 7, SMALLEST = 1e-4;
  const UNITS = [["us", 1], ["ms", 1e3], ["s", 1e6]];

  const put = (parent, tag, attributes = {}, text) => {
    const isHtml = ["button", "ul", "li", "output", "div"].includes(tag);
    const made = isHtml ? document.createElement(tag) : document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  };

  const shown = (value, digits) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  // The largest unit in which `top` microseconds are at least 1; no unit for what is not a time.
  const unitOf = (axis, top) =>
    axis.time ? UNITS.filter(([, us]) => top >= us).pop() ?? UNITS[0] : ["", 1];

  // A round distance between ticks: 1, 2 or 5 times a power of ten.
  const roundStep = (span, most) => {
    const raw = span / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  };

  // [[value, text]] of an axis between two values, about `most` of them.
  const ticksOf = (axis, low, high, most) => {
    if (axis.ticks) return axis.ticks.filter(([value]) => value >= low && value <= high);
    if (axis.log) {
      const powers = [];
      for (let power = 0; power <= high; power++) powers.push([power, shown(10 ** power, 0)]);
      return powers;
    }
    const [, us] = unitOf(axis, high);
    let step = roundStep((high - low) / us, most);
    if (axis.whole) step = Math.max(1, step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const ticks = [];
    for (let place = Math.ceil(low / us / step - 1e-9); place * step * us <= high; place++)
      ticks.push([place * step * us, shown(place * step || 0, digits)]);
    return ticks;
  };

  const titleOf = (axis, top) => {
    const [unit] = unitOf(axis, top);
    return unit ? `${axis.label} (${unit})` : axis.label;
  };

  // A value as text for the line under the chart.
  const told = (axis, value) => {
    const tick = (axis.ticks ?? []).find(([at]) => at === value);
    if (tick) return tick[1];
    const [unit, us] = unitOf(axis, value);
    return axis.time ? `${shown(value / us, 3)} ${unit}` : shown(value, 0);
  };

  // The first index whose value is at least `wanted`.
  const firstFrom = (values, wanted) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  };

  const nearest = (values, wanted) => {
    const after = Math.min(firstFrom(values, wanted), values.length - 1), before = Math.max(0, after - 1);
    return wanted - values[before] < values[after] - wanted ? before : after;
  };

  class Chart {
    constructor(figure, spec) {
      Object.assign(this, { figure, spec });
      const ends = [
        ...spec.lines.flatMap(({ x }) => [x[0], x.at(-1)]),
        ...spec.bars.flatMap(({ edges }) => [edges[0], edges.at(-1)]),
      ];
      this.whole = [Math.min(...ends), Math.max(...ends)];
      if (this.whole[0] === this.whole[1]) this.whole[1] += 1;
      this.range = this.whole;
      this.legend(put(figure, "ul", { class: "legend" }));
      this.plot = put(figure, "svg", { class: "plot", role: "img", "aria-label": `${spec.y.label} by ${spec.x.label}` });
      this.controls(put(figure, "div", { class: "controls" }));
      this.listen();
      this.draw();
      new ResizeObserver(() => this.draw()).observe(figure);
    }

    legend(list) {
      const { lines, bars, points, limits } = this.spec;
      for (const one of [...lines, ...limits, ...bars, ...points]) {
        if (!one.name) continue;
        const item = put(list, "li");
        const isMark = points.includes(one);
        const sample = put(item, "svg", { class: `c-${one.colour}${isMark ? " mark" : ""}`, "aria-hidden": "true" });
        if (isMark) put(sample, "use", { href: `#mark-${one.colour}`, width: 12, height: 12 });
        else if (bars.includes(one)) put(sample, "rect", { class: `bars ${one.style}`, x: 1, y: 1, width: 22, height: 10 });
        else put(sample, "path", { class: `trace ${one.style}`, d: "M0 6H24" });
        item.append(one.name);
      }
    }

    controls(place) {
      const actions = {
        "+": ["zoom in", () => this.scale(0.5)],
        "−": ["zoom out", () => this.scale(2)],
        "←": ["move left", () => this.move(-0.5)],
        "→": ["move right", () => this.move(0.5)],
        "All": ["show all", () => this.zoom(...this.whole)],
      };
      this.buttons = Object.entries(actions).map(([text, [label, act]]) => {
        const button = put(place, "button", { type: "button", "aria-label": label, title: label }, text);
        button.addEventListener("click", act);
        return button;
      });
      this.output = put(place, "output", {}, "Drag over the chart to zoom in.");
    }

    scale(factor) {
      const [low, high] = this.range, middle = (low + high) / 2, half = ((high - low) / 2) * factor;
      this.zoom(middle - half, middle + half);
    }

    move(share) {
      const [low, high] = this.range, by = share * (high - low);
      const kept = Math.max(this.whole[0] - low, Math.min(this.whole[1] - high, by));
      this.zoom(low + kept, high + kept);
    }

    zoom(low, high) {
      if (high - low < SMALLEST * (this.whole[1] - this.whole[0])) return;
      this.range = [Math.max(low, this.whole[0]), Math.min(high, this.whole[1])];
      this.draw();
    }

    // The largest value in sight, in the scale of the y axis.
    top() {
      const [low, high] = this.range, values = [];
      for (const { x, y } of this.spec.lines) values.push(...y.slice(firstFrom(x, low), firstFrom(x, high) + 1));
      for (const { edges, counts } of this.spec.bars)
        counts.forEach((count, place) => { if (edges[place + 1] > low && edges[place] < high) values.push(count); });
      for (const { y } of this.spec.limits) values.push(y);
      const top = values.reduce((most, value) => Math.max(most, value ?? 0), 0);
      return this.spec.y.log ? Math.log10(Math.max(top, 1)) + 0.1 : 1.06 * top || 1;
    }

    draw() {
      const width = this.figure.clientWidth, [low, high] = this.range, { x, y } = this.spec;
      if (!width) return;
      const bottom = y.log ? -0.3 : 0, top = this.top();
      const rows = ticksOf(y, bottom, top, 5);
      const left = 10 + CHARACTER * Math.max(...rows.map(([, text]) => text.length));
      const right = width - RIGHT, base = HEIGHT - BOTTOM;
      this.inner = [left, right];
      this.toX = (value) => left + ((value - low) / (high - low)) * (right - left);
      this.toY = (value) => base - (((y.log ? Math.log10(value) : value) - bottom) / (top - bottom)) * (base - TOP);
      const plot = this.plot;
      plot.replaceChildren();
      plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      plot.setAttribute("height", HEIGHT);
      put(plot, "text", { class: "title", x: 0, y: 12 }, titleOf(y, top));
      for (const [value, text] of rows) {
        const at = base - ((value - bottom) / (top - bottom)) * (base - TOP);
        put(plot, "path", { class: "grid", d: `M${left} ${at}H${right}` });
        put(plot, "text", { x: left - 6, y: at + 4, "text-anchor": "end" }, text);
      }
      this.columns(ticksOf(x, low, high, (right - left) / 80), base);
      put(plot, "text", { class: "title", x: (left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, titleOf(x, high));
      const clip = `${this.spec.name}-clip`;
      put(put(plot, "clipPath", { id: clip }), "rect", { x: left, y: 0, width: right - left, height: base + 1 });
      const inside = put(plot, "g", { "clip-path": `url(#${clip})` });
      for (const bars of this.spec.bars) this.drawBars(inside, bars, base);
      for (const { colour, style, y: at } of this.spec.limits)
        put(inside, "path", { class: `trace ${style} c-${colour}`, d: `M${left} ${this.toY(at)}H${right}` });
      for (const line of this.spec.lines) this.drawLine(inside, line);
      for (const { colour, x: steps, y: values } of this.spec.points)
        steps.forEach((step, place) => {
          if (step < low || step > high) return;
          put(plot, "use", { href: `#mark-${colour}`, class: `c-${colour}`, width: 11, height: 11,
            x: this.toX(step) - 5.5, y: this.toY(values[place]) - 5.5 });
        });
      const isWhole = low === this.whole[0] && high === this.whole[1];
      this.buttons.slice(1).forEach((button) => { button.disabled = isWhole; });
    }

    // Ticks of the x axis; a label that would touch the one before it is left out.
    columns(ticks, base) {
      let free = -Infinity;
      for (const [value, text] of ticks) {
        const at = this.toX(value), half = (CHARACTER * text.length) / 2;
        put(this.plot, "path", { class: "grid", d: `M${at} ${TOP}V${base}` });
        if (at - half < free || at + half > this.inner[1] + RIGHT) continue;
        put(this.plot, "text", { x: at, y: base + 17, "text-anchor": "middle" }, text);
        free = at + half + 6;
      }
    }

    // The largest value of each pixel: what a short peak is about must not depend on the width.
    drawLine(parent, { colour, style, x, y }) {
      const [low, high] = this.range;
      const from = Math.max(0, firstFrom(x, low) - 1), until = Math.min(x.length, firstFrom(x, high) + 2);
      const path = [];
      let isOpen = false, pixel = null, most = 0;
      const flush = () => {
        if (pixel === null) return;
        path.push(`${isOpen ? "L" : "M"}${pixel} ${this.toY(most).toFixed(1)}`);
        [isOpen, pixel] = [true, null];
      };
      for (let place = from; place < until; place++) {
        if (y[place] === null) { flush(); isOpen = false; continue; }
        const at = Math.round(2 * this.toX(x[place])) / 2;
        if (at !== pixel) { flush(); [pixel, most] = [at, y[place]]; }
        most = Math.max(most, y[place]);
      }
      flush();
      put(parent, "path", { class: `trace ${style} c-${colour}`, d: path.join("") || "M0 0" });
    }

    // The outline of a histogram, in steps: two of them can be told apart where they overlap.
    drawBars(parent, { colour, style, edges, counts }, base) {
      const at = (place) => this.toX(edges[place]).toFixed(1);
      let path = `M${at(0)} ${base}`;
      counts.forEach((count, place) => {
        path += `V${count ? this.toY(count).toFixed(1) : base}H${at(place + 1)}`;
      });
      put(parent, "path", { class: `bars ${style} c-${colour}`, d: `${path}V${base}` });
    }

    valueAt(event) {
      const [left, right] = this.inner, [low, high] = this.range;
      const at = event.clientX - this.plot.getBoundingClientRect().left;
      return low + ((Math.max(left, Math.min(right, at)) - left) / (right - left)) * (high - low);
    }

    listen() {
      const { plot } = this;
      let begin = null, selection = null;
      const end = () => { begin = null; selection?.remove(); };
      const selected = (event) => [begin, this.valueAt(event)].sort((one, other) => one - other);
      plot.addEventListener("pointerdown", (event) => { begin = this.valueAt(event); });
      plot.addEventListener("pointermove", (event) => this.tell(this.valueAt(event)));
      // A drag may end beside the chart.
      window.addEventListener("pointermove", (event) => {
        if (begin === null) return;
        const [from, to] = selected(event).map(this.toX);
        selection?.remove();
        selection = put(plot, "rect", { class: "selection", x: from, y: TOP, width: to - from, height: HEIGHT - TOP - BOTTOM });
      });
      window.addEventListener("pointerup", (event) => {
        if (begin === null) return;
        const [low, high] = selected(event);
        if (this.toX(high) - this.toX(low) > 8) this.zoom(low, high);
        end();
      });
      window.addEventListener("pointercancel", end);
      plot.addEventListener("dblclick", () => this.zoom(...this.whole));
    }

    // What is near `value` on the x axis, in words.
    tell(value) {
      const { x: axis, y: other, lines, bars, points } = this.spec, found = [];
      for (const { name, x, y } of lines) {
        const place = nearest(x, value);
        if (!found.length && !axis.ticks) found.push(`${axis.label} ${told(axis, x[place])}`);
        const causes = points.filter(({ x: steps }) => steps.includes(x[place])).map(({ colour }) => colour);
        if (y[place] !== null) found.push(`${name} ${told(other, y[place])} ${causes.join(" ")}`.trim());
      }
      for (const { name, edges, counts } of bars) {
        const place = Math.max(0, Math.min(counts.length - 1, firstFrom(edges, value) - 1));
        found.push(`${name} ${told(axis, edges[place])} to ${told(axis, edges[place + 1])}: ${shown(counts[place], 0)}`.trim());
      }
      this.output.textContent = found.join(", ");
    }
  }

  const charts = JSON.parse(document.getElementById("charts").textContent);
  for (const spec of charts) new Chart(document.querySelector(`[data-chart="${spec.name}"]`), spec);
})();
