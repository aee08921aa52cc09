"use strict";
// All that is put into the page is text: names come from strangers.
(() => {
  const $ = (id) => document.getElementById(id);
  const read = (id) => ($(id) ? JSON.parse($(id).textContent) : null);
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  document.documentElement.classList.add("scripted");

  // --- the grid: one cell is in the tab order, arrows move it, and what it says is read out.
  const cells = $("cells");
  if (cells) {
    const columns = read("columns");
    const rows = [...cells.tBodies[0].rows];
    const places = rows.map((row) => {
      let at = 0;
      return [...row.cells].slice(1).map((cell) => [cell, at, (at += cell.colSpan)]);
    });
    const where = new Map();
    places.forEach((row, y) => row.forEach(([cell, first, end]) => where.set(cell, [y, first, end])));
    const words = JSON.parse($("states").textContent);
    const say = (cell) => {
      const [y, first, end] = where.get(cell);
      const state = cell.className ? words[Number(cell.className[1])] : "nothing belongs here";
      const column = end - first > 1 ? `${columns[first]} to ${columns[end - 1]}` : columns[first];
      $("readout").textContent = cell.title || `${rows[y].cells[0].textContent}, ${column}: ${state}`;
    };
    let current = places[0] && places[0][0] && places[0][0][0];
    for (const row of places) for (const [cell, , ] of row) if (current === places[0][0][0] && /^s[0-4]/.test(cell.className)) current = cell;
    if (current) current.tabIndex = 0;
    const go = (cell) => {
      current.tabIndex = -1;
      current = cell;
      current.tabIndex = 0;
      current.focus();
    };
    cells.addEventListener("mouseover", (event) => where.has(event.target) && say(event.target));
    cells.addEventListener("focusin", (event) => where.has(event.target) && say(event.target));
    cells.addEventListener("click", (event) => where.has(event.target) && go(event.target));
    cells.addEventListener("keydown", (event) => {
      if (!where.has(event.target)) return;
      const [y, first, end] = where.get(event.target);
      const at = (row, column) => places[row].find(([, a, b]) => a <= column && column < b)[0];
      const last = columns.length - 1;
      const to = {
        ArrowLeft: first > 0 && (() => at(y, first - 1)),
        ArrowRight: end <= last && (() => at(y, end)),
        ArrowUp: y > 0 && (() => at(y - 1, first)),
        ArrowDown: y < places.length - 1 && (() => at(y + 1, first)),
        Home: () => at(y, 0),
        End: () => at(y, last),
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      if (to) go(to());
    });
  }

  // --- the tensors: searched, sorted, and each with its density.
  const hits = $("hits");
  if (!hits) return;
  const data = read("data");
  const SHOWN = 100;
  const figure = (x) => (x === null || x === undefined ? "" : String(Number(x.toPrecision(4))));
  const bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (n < 1024) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
      n /= 1024;
    }
    return `${n.toFixed(1)} TiB`;
  };
  const form = (row) => data.forms[row[1]];
  const stat = (row, i) => (row[4] ? row[4][i] : null);
  const counted = data.rows.some((row) => row[4]);
  // What a column is called, what it shows, and what it is sorted by.
  const columns = [
    ["tensor", (row) => row[0], (row) => row[0], false],
    ["dtype", (row) => form(row)[0], (row) => form(row)[0], false],
    ["shape", (row) => form(row)[1] || row[3], (row) => form(row)[1], false],
    ["bytes", (row) => (form(row)[0] ? bytes(form(row)[2]) : ""), (row) => form(row)[2], true],
    ["pieces", (row) => row[2] || "", (row) => row[2], true],
  ];
  if (counted) {
    ["min", "max", "mean", "std"].forEach((name, i) => columns.push([name, (row) => figure(stat(row, i)), (row) => stat(row, i), true]));
    columns.push(["zeros", (row) => (stat(row, 4) ? `${figure(100 * stat(row, 4))} %` : ""), (row) => stat(row, 4), true]);
    columns.push(["NaN, inf", (row) => (stat(row, 5) || stat(row, 6) ? `${stat(row, 5)}, ${stat(row, 6)}` : ""), (row) => stat(row, 5) + stat(row, 6), true]);
  }
  let order = null;
  let down = false;
  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => {
    const by = columns[order][2];
    const [x, y] = [by(a), by(b)];
    const known = (x === null) - (y === null);
    if (known) return known;
    const sign = columns[order][3] ? x - y : collator.compare(x, y);
    return down ? -sign : sign;
  };
  const head = hits.tHead.insertRow();
  columns.forEach(([name, , , number], i) => {
    const cell = make("th", undefined, number ? "num" : "");
    cell.scope = "col";
    const button = make("button", name);
    button.type = "button";
    button.addEventListener("click", () => {
      down = order === i ? !down : number && i > 0;
      order = i;
      [...head.cells].forEach((other, j) => (j === i ? other.setAttribute("aria-sort", down ? "descending" : "ascending") : other.removeAttribute("aria-sort")));
      show();
    });
    cell.append(button);
    head.append(cell);
  });

  const NS = "http://www.w3.org/2000/svg";
  const shape = (tag, attributes, text) => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const density = (row) => {
    const [edges, heights, below, above] = row[4][8];
    const [width, height, base] = [340, 130, 105];
    const low = edges[0];
    const span = edges[edges.length - 1] - low || 1;
    const top = Math.max(...heights) || 1;
    const x = (value) => (10 + ((value - low) / span) * (width - 20)).toFixed(1);
    const y = (value) => (base - (value / top) * (base - 8)).toFixed(1);
    let path = `M${x(edges[0])} ${base}`;
    heights.forEach((h, i) => (path += `V${y(h)}H${x(edges[i + 1])}`));
    const svg = shape("svg", { role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": `Density of ${row[0]}` });
    svg.append(shape("path", { d: `${path}V${base}Z`, class: "f-c0 s-c0", "fill-opacity": ".25" }));
    svg.append(shape("line", { x1: 10, x2: width - 10, y1: base, y2: base, class: "s-mut" }));
    for (const [value, anchor] of [[edges[0], "start"], [edges[edges.length - 1], "end"]])
      svg.append(shape("text", { x: x(value), y: base + 16, "text-anchor": anchor, "font-size": "11px", class: "f-ink" }, figure(value)));
    if (low < 0 && low + span > 0) svg.append(shape("text", { x: x(0), y: base + 16, "text-anchor": "middle", "font-size": "11px", class: "f-ink" }, "0"));
    const beyond = below + above ? `; tails cut: ${figure(100 * below)} % below, ${figure(100 * above)} % above` : "";
    return [svg, make("p", `density on a linear axis${beyond}`, "more")];
  };
  const detail = (row) => {
    const box = document.createDocumentFragment();
    if (row[3]) box.append(make("p", row[3]));
    if (stat(row, 7)) box.append(make("p", `zero throughout: ${stat(row, 7)}`));
    if (stat(row, 8)) box.append(...density(row));
    else box.append(make("p", row[4] ? "no density: all that is not zero is of one value, or nothing is finite" : row[3] ? "" : "no statistics: fastshard report --stats", "more"));
    return box;
  };
  const toggle = (line, row) => {
    const open = line.getAttribute("aria-expanded") === "true";
    line.setAttribute("aria-expanded", String(!open));
    if (open) line.nextSibling.remove();
    else {
      const below = make("tr");
      const cell = make("td", undefined, "open");
      cell.colSpan = columns.length;
      cell.append(detail(row));
      below.append(cell);
      line.after(below);
    }
  };
  const body = hits.tBodies[0];
  const show = () => {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = data.rows.filter((row) => {
      const text = `${row[0]} ${form(row)[0]} ${form(row)[1]} ${row[3]}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (order !== null) found = [...found].sort(compare);
    const lines = found.slice(0, SHOWN).map((row, i) => {
      const line = make("tr");
      line.tabIndex = i ? -1 : 0;
      line.setAttribute("aria-expanded", "false");
      columns.forEach(([, text, , number], j) => {
        const cell = make(j ? "td" : "th", text(row), number ? "num" : "");
        if (!j) cell.scope = "row";
        line.append(cell);
      });
      line.addEventListener("click", () => toggle(line, row));
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") toggle(line, row);
        else if (event.key === "ArrowDown" && i + 1 < lines.length) lines[i + 1].focus();
        else if (event.key === "ArrowUp") (i ? lines[i - 1] : $("search")).focus();
        else return;
        event.preventDefault();
      });
      return line;
    });
    body.replaceChildren(...lines);
    const first = found.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    $("found").textContent = `${found.length.toLocaleString("en")} ${found.length === 1 ? "tensor" : "tensors"}${first}. Enter shows the distribution of one; columns sort.`;
  };
  $("search").addEventListener("input", show);
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && body.rows[0]) {
      body.rows[0].focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      $("search").value = "";
      show();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    $("search").focus();
  });
  show();
})();
