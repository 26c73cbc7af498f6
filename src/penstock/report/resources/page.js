"use strict";
// The parts of the page that move: lanes, steps and charts. Everything else is plain HTML and stands without this script.
// Texts reach the document through textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // --- drawing -------------------------------------------------------------------------------------------------------

  function svg(name, attributes = {}, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  const box = (x, y, width, height) => `M${x.toFixed(2)} ${y}h${width.toFixed(2)}v${height}h${(-width).toFixed(2)}z`;

  function shorten(text, width) {
    const most = Math.floor(width / 6.6);
    return text.length <= most ? text : most > 2 ? text.slice(0, most - 1) + "…" : "";
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const size = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const places = [];
    for (let place = Math.ceil(low / size - 1e-9); place * size <= high + size * 1e-9; place++) places.push(place * size || 0);
    return places;
  }

  function number(value) {
    if (!Number.isFinite(value)) return "–";
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(0);
    return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
  }

  function seconds(value) {
    if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
    if (Math.abs(value) >= 1 || value === 0) return `${number(value)} s`;
    return Math.abs(value) >= 1e-3 ? `${number(value * 1e3)} ms` : `${number(value * 1e6)} µs`;
  }

  // All labels of one axis have one unit and as many digits as tell two ticks apart.
  function axisLabels(places) {
    const largest = Math.max(...places.map(Math.abs), 0);
    const [factor, unit] = largest >= 1 || !largest ? [1, "s"] : largest >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const gap = places.length > 1 ? (places[1] - places[0]) * factor : 1;
    const digits = clamp(-Math.floor(Math.log10(gap) + 1e-9), 0, 6);
    return places.map((place) => `${(place * factor).toFixed(digits)} ${unit}`);
  }

  function picture(holder, height, label) {
    const width = Math.max(260, holder.clientWidth);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    holder.replaceChildren(root);
    return [root, width];
  }

  // The same picture again for every new width; printing scales what is there.
  function drawOnResize(holder, draw) {
    let known = 0;
    new ResizeObserver(() => {
      if (holder.clientWidth && holder.clientWidth !== known) {
        known = holder.clientWidth;
        draw();
      }
    }).observe(holder);
  }

  // --- what is highlighted: the steps of a finding, or one batch -----------------------------------------------------

  const chosen = { finding: null, step: null };
  const listeners = [];

  function choose(finding, step) {
    chosen.finding = finding;
    chosen.step = step;
    document.querySelectorAll(".finding").forEach((card, place) => {
      card.classList.toggle("marked", place === finding);
      card.querySelector("button.show")?.setAttribute("aria-pressed", String(place === finding));
    });
    listeners.forEach((listener) => listener());
  }

  const isChosen = () => chosen.finding !== null || chosen.step !== null;

  function isLit(first, last = first) {
    if (chosen.step !== null) return first <= chosen.step && chosen.step <= last;
    if (chosen.finding === null) return true;
    return data.findings[chosen.finding].some(([from, to]) => first < to && from <= last);
  }

  // --- lanes ---------------------------------------------------------------------------------------------------------

  const lanes = data.lanes.map((lane) => {
    let start = 0;  // starts come as differences, in microseconds
    const spans = lane.start.map((difference, place) => {
      start += difference;
      const begin = start / 1e6;
      return { begin, end: begin + lane.duration[place] / 1e6, kind: data.kinds[lane.kind[place]],
               step: lane.step[place], label: data.labels[lane.label[place]] };
    });
    return { name: lane.name, spans, longest: Math.max(0, ...spans.map((span) => span.end - span.begin)) };
  });
  const whole = {
    from: Math.min(...lanes.map((lane) => lane.spans[0]?.begin ?? Infinity)),
    to: Math.max(...lanes.flatMap((lane) => lane.spans.map((span) => span.end))),
  };
  const view = firstView();
  const ROW = 30, TOP = 8;

  function firstFrom(spans, moment) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].begin < moment) low = middle + 1; else high = middle;
    }
    return low;
  }

  function stretchOf(isWanted) {
    const stretch = { from: Infinity, to: -Infinity };
    for (const lane of lanes) for (const span of lane.spans) if (span.step !== null && isWanted(span.step)) {
      stretch.from = Math.min(stretch.from, span.begin);
      stretch.to = Math.max(stretch.to, span.end);
    }
    return stretch.to > stretch.from ? stretch : null;
  }

  // Of a long run, a stretch in which single steps can be seen: where the first finding points, or the beginning.
  function firstView() {
    const spans = lanes[0]?.spans ?? [], most = 160;
    if (spans.length <= 2 * most) return { ...whole };
    const wanted = data.findings.flat()[0]?.[0];
    const found = spans.findIndex((span) => span.step !== null && span.step === wanted);
    const from = clamp(found - most / 4, 0, spans.length - most);
    return { from: spans[from].begin, to: spans[from + most - 1].end };
  }

  // One path for each kind, so that thousands of spans are a handful of elements.
  function spanPaths(lane, x, y, height, from, to) {
    const paths = new Map(), reached = new Map(), wide = [];
    for (let place = firstFrom(lane.spans, from - lane.longest); place < lane.spans.length; place++) {
      const span = lane.spans[place];
      if (span.begin > to) break;
      if (span.end < from) continue;
      const key = `${span.kind.id} ${isChosen() && !(span.step !== null && isLit(span.step)) ? "faded" : "lit"}`;
      const left = Math.max(x(span.begin), x(from)), right = Math.min(x(span.end), x(to));
      if (right <= (reached.get(key) ?? -1)) continue;  // nothing that could be seen
      const width = Math.max(right - left - (right - left > 3 ? 0.8 : 0), 0.7);
      paths.set(key, (paths.get(key) ?? "") + box(left, y, width, height));
      reached.set(key, left + width + 0.2);
      if (width > 34 && !key.endsWith("faded")) wide.push([span, left, width]);
    }
    return [paths, wide];
  }

  function setUpLanes() {
    const holder = byId("lanes"), readout = byId("lanes-readout");
    if (!holder) return;
    const height = TOP + lanes.length * ROW + 26;
    let root, width, gutter, x;

    function draw() {
      [root, width] = picture(holder, height, "What the training loop and its workers did, and when");
      root.setAttribute("tabindex", "0");
      gutter = width < 560 ? 68 : 112;
      const perSecond = (width - gutter - 10) / (view.to - view.from);
      x = (moment) => gutter + (moment - view.from) * perSecond;
      const places = ticks(view.from, view.to, (width - gutter) / 90), labels = axisLabels(places);
      places.forEach((place, index) => {
        root.append(svg("line", { class: "grid", x1: x(place), x2: x(place), y1: TOP - 4, y2: height - 22 }));
        root.append(svg("text", { x: x(place), y: height - 8, "text-anchor": "middle" }, labels[index]));
      });
      if (chosen.finding !== null) drawBands();
      lanes.forEach((lane, place) => drawLane(lane, TOP + place * ROW));
      drawOverview();
    }

    function drawBands() {
      for (const [first, end] of data.findings[chosen.finding]) {
        const stretch = stretchOf((step) => first <= step && step < end);
        if (!stretch || stretch.to < view.from || stretch.from > view.to) continue;
        const left = x(Math.max(stretch.from, view.from)), right = x(Math.min(stretch.to, view.to));
        root.append(svg("path", { class: "band", d: box(left - 2, 2, right - left + 4, height - 26) }));
      }
    }

    function drawLane(lane, y) {
      const title = svg("text", { class: "row", x: 8, y: y + 15 }, shorten(lane.name, gutter - 12));
      title.append(svg("title", {}, lane.name));
      root.append(title);
      const [paths, wide] = spanPaths(lane, x, y, ROW - 8, view.from, view.to);
      for (const [key, path] of paths) {
        const [kind, shade] = key.split(" ");
        root.append(svg("path", { class: shade, d: path, fill: `var(--${kind})` }));
      }
      for (const [span, left, room] of wide) {
        const shade = { idle: " plain", collate: " dark" }[span.kind.id] || "";
        const words = shorten(span.label || span.kind.short, room - 8);
        if (words) root.append(svg("text", { class: `on-span${shade}`, x: left + 5, y: y + 15 }, words));
      }
    }

    function drawOverview() {
      const [strip, full] = picture(byId("overview"), 26, "The whole run, and which part of it the lanes show");
      const place = (moment) => gutter + ((moment - whole.from) / (whole.to - whole.from)) * (full - gutter - 10);
      const [paths] = spanPaths(lanes[0], place, 7, 12, whole.from, whole.to);
      for (const [key, path] of paths) {
        const [kind, shade] = key.split(" ");
        strip.append(svg("path", { class: shade, d: path, fill: `var(--${kind})` }));
      }
      strip.append(svg("text", { x: 8, y: 17 }, full < 560 ? "all" : "whole run"));
      const left = place(view.from), right = place(view.to);
      strip.append(svg("rect", { class: "window", x: left, y: 3, width: Math.max(4, right - left), height: 20, rx: 3 }));
    }

    function show(from, to) {
      const length = clamp(to - from, Math.min(1e-5, whole.to - whole.from), whole.to - whole.from);
      view.from = clamp(from, whole.from, whole.to - length);
      view.to = view.from + length;
      draw();
    }

    function zoom(factor, middle = (view.from + view.to) / 2) {
      show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
    }

    const momentAt = (clientX) => {
      const area = root.getBoundingClientRect();
      return view.from + ((((clientX - area.left) / area.width) * width - gutter) / (width - gutter - 10)) * (view.to - view.from);
    };

    function spanAt(event) {
      const area = root.getBoundingClientRect();
      const lane = lanes[Math.floor((((event.clientY - area.top) / area.height) * height - TOP) / ROW)];
      if (!lane || event.clientX - area.left < gutter) return null;
      const moment = momentAt(event.clientX), near = 2 * (view.to - view.from) / width;
      let best = null;
      for (let place = firstFrom(lane.spans, moment - lane.longest - near); place < lane.spans.length; place++) {
        const span = lane.spans[place];
        if (span.begin > moment + near) break;
        if (span.end < moment - near) continue;
        const away = Math.max(span.begin - moment, moment - span.end, 0);
        if (!best || away <= best.away) best = { ...span, lane: lane.name, away };
      }
      return best;
    }

    function tell(span) {
      if (!span) return;
      const step = span.step === null ? "" : `, step ${span.step}`;
      const label = span.label ? ` (${span.label})` : "";
      readout.textContent = `${span.lane}: ${span.kind.name}${label}${step}, ${seconds(span.end - span.begin)}, from ${seconds(span.begin)}`;
    }

    // One finger or the mouse drags, two fingers pinch; a press without a move is a click.
    const fingers = new Map();
    let moved = false, pinched = null;
    holder.addEventListener("pointerdown", (event) => {
      fingers.set(event.pointerId, event.clientX);
      holder.setPointerCapture(event.pointerId);
      moved = false;
      const places = [...fingers.values()];
      pinched = places.length === 2 ? { gap: Math.abs(places[0] - places[1]), ...view } : null;
    });
    holder.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return tell(spanAt(event));
      const before = fingers.get(event.pointerId);
      if (Math.abs(event.clientX - before) < 3 && !moved) return;
      moved = true;
      fingers.set(event.pointerId, event.clientX);
      if (pinched && fingers.size === 2) {
        const [one, other] = [...fingers.values()];
        const factor = Math.max(20, pinched.gap) / Math.max(20, Math.abs(one - other));
        const middle = momentAt((one + other) / 2), length = (pinched.to - pinched.from) * factor;
        const share = (middle - view.from) / (view.to - view.from);
        show(middle - share * length, middle + (1 - share) * length);
      } else {
        const shift = momentAt(before) - momentAt(event.clientX);
        show(view.from + shift, view.to + shift);
      }
    });
    for (const ending of ["pointerup", "pointercancel"]) holder.addEventListener(ending, (event) => {
      fingers.delete(event.pointerId);
      pinched = null;
      if (ending === "pointercancel" || moved) return;
      const span = spanAt(event);
      tell(span);
      choose(null, span && span.step !== chosen.step ? span.step : null);
    });
    holder.addEventListener("dblclick", (event) => zoom(0.4, momentAt(event.clientX)));
    holder.addEventListener("wheel", (event) => {
      const isZoom = event.ctrlKey || event.metaKey;
      if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return;
      event.preventDefault();
      if (isZoom) return zoom(Math.exp(event.deltaY / 250), momentAt(event.clientX));
      const shift = (event.deltaX / width) * (view.to - view.from);
      show(view.from + shift, view.to + shift);
    }, { passive: false });
    holder.addEventListener("keydown", (event) => {
      const quarter = (view.to - view.from) / 4;
      const act = {
        ArrowLeft: () => show(view.from - quarter, view.to - quarter),
        ArrowRight: () => show(view.from + quarter, view.to + quarter),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
        Home: () => show(whole.from, whole.to), Escape: () => choose(null, null),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
      root.focus();
    });
    const overview = byId("overview");
    const jump = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const area = overview.getBoundingClientRect();
      const share = ((event.clientX - area.left) / area.width * width - gutter) / (width - gutter - 10);
      const middle = whole.from + share * (whole.to - whole.from), half = (view.to - view.from) / 2;
      show(middle - half, middle + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); jump(event); });
    overview.addEventListener("pointermove", jump);
    byId("zoom-in").addEventListener("click", () => zoom(0.5));
    byId("zoom-out").addEventListener("click", () => zoom(2));
    byId("zoom-all").addEventListener("click", () => show(whole.from, whole.to));

    // What was chosen comes into view, with room around it.
    listeners.push(() => {
      const stretch = isChosen() && stretchOf((step) => isLit(step));
      const isVisible = stretch && stretch.from < view.to && stretch.to > view.from;
      if (!stretch || isVisible) return draw();
      const half = Math.max((view.to - view.from) / 2, (stretch.to - stretch.from) * 0.7), middle = (stretch.from + stretch.to) / 2;
      show(middle - half, middle + half);
    });
    drawOnResize(holder, draw);
  }

  // --- wait and step of every step -----------------------------------------------------------------------------------

  function setUpSteps() {
    const holder = byId("steps"), readout = byId("steps-readout"), times = data.steps;
    if (!holder) return;
    const count = times.wait.length, height = 190, left = 58, bottom = height - 26;
    const firstOf = (entry) => times.first + entry * times.per;
    let root, width, x;

    function draw() {
      [root, width] = picture(holder, height, "Wait and step of every step");
      x = (entry) => left + (entry / count) * (width - left - 10);
      const columns = Math.min(count, Math.floor((width - left - 10) / 1.5));
      const highest = Math.max(...times.wait.map((wait, entry) => wait + times.step[entry]), 1e-9);
      const y = (value) => bottom - (value / highest) * (bottom - 12);
      const places = ticks(0, highest, 4), labels = axisLabels(places);
      places.forEach((place, index) => {
        root.append(svg("line", { class: "grid", x1: left, x2: width - 10, y1: y(place), y2: y(place) }));
        root.append(svg("text", { x: left - 7, y: y(place) + 4, "text-anchor": "end" }, labels[index]));
      });
      ticks(firstOf(0), firstOf(count), (width - left) / 80).filter((place) => Number.isInteger(place)).forEach((place) => {
        const middle = x((place - times.first + (times.per === 1 ? 0.5 : 0)) / times.per);
        if (middle < width - 14) root.append(svg("text", { x: middle, y: height - 8, "text-anchor": "middle" }, place.toLocaleString("en")));
      });
      drawBars(columns, y);
    }

    // More steps than columns: each column shows the one that took longest, so that no peak is lost.
    function drawBars(columns, y) {
      const paths = new Map();
      for (let column = 0; column < columns; column++) {
        const from = Math.floor((column * count) / columns), to = Math.max(from + 1, Math.floor(((column + 1) * count) / columns));
        let entry = from;
        for (let each = from; each < to; each++) if (times.wait[each] + times.step[each] > times.wait[entry] + times.step[entry]) entry = each;
        const shade = isChosen() && !isLit(firstOf(from), firstOf(to) - 1) ? "faded" : "lit";
        const begin = x(from), room = x(to) - begin, bar = Math.max(0.6, room > 4 ? Math.min(room - 1.2, 26) : room);
        const offset = begin + (room - bar) / 2;
        const floor = y(times.step[entry]), top = y(times.step[entry] + times.wait[entry]);
        for (const [kind, high, low] of [["step", floor, bottom], ["wait", top, floor]]) {
          const key = `${kind} ${shade}`;
          paths.set(key, (paths.get(key) ?? "") + box(offset, high.toFixed(2), bar, (low - high).toFixed(2)));
        }
      }
      for (const [key, path] of paths) {
        const [kind, shade] = key.split(" ");
        root.append(svg("path", { class: shade, d: path, fill: `var(--${kind})` }));
      }
    }

    function entryAt(event) {
      const area = root.getBoundingClientRect();
      return clamp(Math.floor(((((event.clientX - area.left) / area.width) * width - left) / (width - left - 10)) * count), 0, count - 1);
    }

    function tell(entry) {
      const first = firstOf(entry), several = times.per > 1;
      const name = several ? `steps ${first.toLocaleString("en")} to ${(first + times.per - 1).toLocaleString("en")}, on average` : `step ${first}`;
      readout.textContent = `${name}: waited ${seconds(times.wait[entry])}, computed ${seconds(times.step[entry])}`;
    }

    holder.addEventListener("pointermove", (event) => tell(entryAt(event)));
    holder.addEventListener("click", (event) => {
      const entry = entryAt(event);
      tell(entry);
      choose(null, chosen.step === firstOf(entry) ? null : firstOf(entry));
    });
    listeners.push(draw);
    drawOnResize(holder, draw);
  }

  // --- figures over time ---------------------------------------------------------------------------------------------

  const cursors = [];

  function setUpChart(chart, holder) {
    const figure = holder.querySelector(".figure"), height = 150, left = 50, bottom = height - 24;
    const values = holder.querySelectorAll(".legend b");
    const known = chart.lines.flatMap((line) => line.filter((value) => value !== null));
    const lowest = Math.min(0, ...known), highest = Math.max(...known, 0) || lowest + 1;
    const from = chart.times[0], to = chart.times[chart.times.length - 1];
    let root, width, x, cursor;

    function draw() {
      [root, width] = picture(figure, height, holder.querySelector("h3").textContent);
      x = (moment) => left + ((moment - from) / (to - from || 1)) * (width - left - 12);
      const y = (value) => bottom - ((value - lowest) / (highest - lowest)) * (bottom - 12);
      for (const place of ticks(lowest, highest, 4)) {
        root.append(svg("line", { class: "grid", x1: left, x2: width - 12, y1: y(place), y2: y(place) }));
        root.append(svg("text", { x: left - 7, y: y(place) + 4, "text-anchor": "end" }, number(place)));
      }
      const places = ticks(from, to, (width - left) / 50), labels = axisLabels(places);
      places.forEach((place, index) => root.append(svg("text", { x: x(place), y: height - 7, "text-anchor": "middle" }, labels[index])));
      chart.lines.forEach((line, place) => {
        const points = line.map((value, index) => [index, value]).filter(([, value]) => value !== null);
        const path = points.map(([index, value], at) => `${at ? "L" : "M"}${x(chart.times[index]).toFixed(1)} ${y(value).toFixed(1)}`);
        if (points.length === 1) path.push("h0.1");
        root.append(svg("path", { class: "curve", d: path.join(""), stroke: `var(--line-${place % 6})` }));
      });
      cursor = svg("line", { class: "cursor", y1: 6, y2: bottom, visibility: "hidden" });
      root.append(cursor);
    }

    function point(moment) {
      if (!cursor) return;
      cursor.setAttribute("visibility", moment === null ? "hidden" : "visible");
      if (moment !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(clamp(moment, from, to)));
      let place = chart.times.length - 1;
      if (moment !== null) while (place > 0 && chart.times[place] > moment) place--;
      chart.lines.forEach((line, index) => {
        let at = place;
        while (at > 0 && line[at] === null) at--;  // the last that was measured
        values[index].textContent = moment === null || line[at] === null ? "" : number(line[at]);
      });
    }

    cursors.push(point);
    figure.addEventListener("pointermove", (event) => {
      const area = root.getBoundingClientRect();
      const share = (((event.clientX - area.left) / area.width) * width - left) / (width - left - 12);
      cursors.forEach((each) => each(from + clamp(share, 0, 1) * (to - from)));
    });
    figure.addEventListener("pointerleave", () => cursors.forEach((each) => each(null)));
    drawOnResize(figure, draw);
  }

  // --- findings, slowest samples -------------------------------------------------------------------------------------

  document.querySelectorAll(".finding").forEach((card, place) => {
    const copy = card.querySelector("button.copy");
    copy?.addEventListener("click", async (event) => {
      event.stopPropagation();
      await navigator.clipboard?.writeText(card.querySelector(".change code").textContent);
      copy.textContent = "copied";
    });
    if (data.findings[place].length) card.addEventListener("click", () => {
      if (String(getSelection())) return;  // somebody selects text
      choose(chosen.finding === place ? null : place, null);
    });
  });
  document.querySelectorAll("tr[data-step]").forEach((row) => {
    row.addEventListener("click", () => choose(null, Number(row.dataset.step)));
  });

  if (lanes.length) setUpLanes();
  if (data.steps) setUpSteps();
  document.querySelectorAll(".chart").forEach((holder, place) => setUpChart(data.charts[place], holder));
})();
