"use strict";
const $ = (q, e = document) => e.querySelector(q), $$ = (q, e = document) => [...e.querySelectorAll(q)];
const root = document.documentElement, data = JSON.parse($("#data").textContent);
root.classList.add("js");

/* copy and download */
async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); }
  catch {
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text; area.select(); document.execCommand("copy"); area.remove(); button.focus();
  }
  const was = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = was; }, 1500);
}
$$("[data-copy]").forEach(b => b.addEventListener("click", () => copy($(b.dataset.copy).textContent, b)));
$$("[data-summary]").forEach(b => b.addEventListener("click", () => copy(data.summary, b)));
$$("[data-save]").forEach(b => b.addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2) + "\n"], { type: "application/json" }));
  link.download = "report.json"; link.click(); URL.revokeObjectURL(link.href);
}));

/* a link to something inside a closed <details> opens it */
function reveal() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (!document.getElementById(name) && name.startsWith("t-") && window.findTensor) findTensor(name.slice(2));
  const target = name && document.getElementById(name);
  if (!target) return;
  for (let d = target.closest("details"); d; d = d.parentElement.closest("details")) d.open = true;
  target.scrollIntoView({ block: "center" });
}
addEventListener("hashchange", reveal);
addEventListener("beforeprint", () => $$("details.print").forEach(d => { d.open = true; }));

/* the grid: card, arrow keys, bands, filter */
const grid = $("#cells");
if (grid) {
  const box = grid.closest(".gridbox"), card = $("#readout"), { columns, rows: names } = data.grid;
  grid.setAttribute("role", "grid");
  const cells = () => $$("td.c", grid), title = row => row.dataset.name;
  const span = (from, n) => n === 1 ? columns[from] : `${columns[from]} to ${columns[from + n - 1].replace("layer ", "")}`;
  const first = () => cells().find(t => !t.matches(".s6, .n")) || cells()[0];
  function place(td, x, y) {
    const of = names[td.parentNode.dataset.b] || [], r = td.getBoundingClientRect(), n = td.colSpan, from = +td.dataset.c;
    let who = title(td.parentNode), what = span(from, n);
    if (x !== undefined) {
      if (of.length > 1 && !td.closest(".one")) who = of[Math.max(0, Math.min(of.length - 1, Math.floor((y - r.top) / r.height * of.length)))];
      what = columns[from + Math.min(n - 1, Math.max(0, Math.floor((x - r.left) / r.width * n)))];
    }
    card.textContent = `${who}, ${what}: ${td.dataset.s}`;
    card.hidden = false;
    const b = box.getBoundingClientRect(), mid = (x ?? r.left + r.width / 2) - b.left;
    card.style.left = Math.max(0, Math.min(b.width - card.offsetWidth, mid - card.offsetWidth / 2)) + "px";
    card.style.top = r.bottom - b.top + 6 + "px";
  }
  const hide = () => { card.hidden = true; };
  grid.addEventListener("mousemove", e => { const td = e.target.closest("td.c"); if (td) place(td, e.clientX, e.clientY); else hide(); });
  grid.addEventListener("mouseleave", hide);
  grid.addEventListener("focusin", e => { const td = e.target.closest("td.c"); if (td) place(td); });
  grid.addEventListener("focusout", hide);
  cells().forEach(c => { c.tabIndex = -1; $$("a", c).forEach(a => { a.tabIndex = -1; }); });
  if (first()) first().tabIndex = 0;
  grid.addEventListener("keydown", e => {
    const td = e.target.closest("td.c");
    if (!td) return;
    const row = $$("td.c", td.parentNode), rows = $$("tr", grid).filter(r => $("td.c", r)), i = rows.indexOf(td.parentNode), at = +td.dataset.c;
    const over = r => r && $$("td.c", r).find(c => +c.dataset.c + c.colSpan > at);
    const to = { ArrowRight: row[row.indexOf(td) + 1], ArrowLeft: row[row.indexOf(td) - 1], Home: row[0], End: row[row.length - 1],
      ArrowDown: over(rows[i + 1]), ArrowUp: over(rows[i - 1]) }[e.key];
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(td); }
    if (e.key === "Escape") { hide(); choose(null); }
    if (to) { e.preventDefault(); td.tabIndex = -1; to.tabIndex = 0; to.focus(); }
  });
  const chip = $("#chip"), causes = $$(".cause");
  function choose(td) {
    const same = td && td.classList.contains("on");
    $$(".on", grid).forEach(c => c.classList.remove("on"));
    if (!td || same) { causes.forEach(a => { a.hidden = false; }); chip.hidden = true; return; }
    td.classList.add("on");
    const of = (td.dataset.f || "").split(" ").filter(Boolean).map(n => `f${n}`);
    causes.forEach(a => { a.hidden = !of.includes(a.id); });
    $("#chosen").textContent = `${title(td.parentNode)}, ${span(+td.dataset.c, td.colSpan)}${of.length ? "" : ": none here"}`;
    chip.hidden = false;
    if (of.length) $("#findings").scrollIntoView({ block: "nearest" });
  }
  $("#chip button").addEventListener("click", () => choose(null));
  grid.addEventListener("click", e => {
    const more = e.target.closest("button.more"), td = e.target.closest("td.c");
    if (td) { e.preventDefault(); choose(td); }
    if (!more) return;
    const band = more.closest("tr"), open = more.getAttribute("aria-expanded") === "true";
    more.setAttribute("aria-expanded", String(!open));
    if (open) { while (band.nextElementSibling?.matches(".one")) band.nextElementSibling.remove(); return; }
    band.after(...names[band.dataset.b].map(name => {
      const row = band.cloneNode(true);
      row.className = "one"; row.dataset.name = name;
      $("th", row).textContent = name; $$("td", row).forEach(c => { c.tabIndex = -1; c.removeAttribute("aria-label"); });
      return row;
    }));
  });
}

/* the tensors: searched, sorted, each with its density; all that is put into the page is text */
const hits = $("#hits");
if (hits) {
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  // --- the tensors: searched, sorted, and each with its density.
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
    const words = $("#search").value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = data.rows.filter((row) => {
      const text = `${row[0]} ${form(row)[0]} ${form(row)[1]} ${row[3]}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (order !== null) found = [...found].sort(compare);
    const lines = found.slice(0, SHOWN).map((row, i) => {
      const line = make("tr");
      line.tabIndex = i ? -1 : 0;
      line.setAttribute("aria-expanded", "false");
      line.id = `t-${row[0]}`;
      columns.forEach(([, text, , number], j) => {
        const cell = make(j ? "td" : "th", text(row), number ? "num" : "");
        if (!j) cell.scope = "row";
        line.append(cell);
      });
      line.addEventListener("click", () => toggle(line, row));
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") toggle(line, row);
        else if (event.key === "ArrowDown" && i + 1 < lines.length) lines[i + 1].focus();
        else if (event.key === "ArrowUp") (i ? lines[i - 1] : $("#search")).focus();
        else return;
        event.preventDefault();
      });
      return line;
    });
    body.replaceChildren(...lines);
    const first = found.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    $("#found").textContent = `${found.length.toLocaleString("en")} ${found.length === 1 ? "tensor" : "tensors"}${first}. Enter shows the distribution of one; columns sort.`;
  };
  $("#search").addEventListener("input", show);
  $("#search").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && body.rows[0]) {
      body.rows[0].focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      $("#search").value = "";
      show();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    event.preventDefault();
    $("#search").closest("details").open = true;
    $("#search").focus();
  });
  show();
  window.findTensor = (name) => { $("#search").value = name; show(); };
}
reveal();
