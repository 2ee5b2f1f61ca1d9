"use strict";
const at = id => document.getElementById(id);
let picture = null, skew = 0, stream = null;

function make(name, text, kind) {
  const node = document.createElement(name);
  node.textContent = text;
  if (kind) node.className = kind;
  return node;
}
function put(node, text) { if (node.textContent !== text) node.textContent = text; node.hidden = text === ""; }
function score(value) { return value === null ? "\u2013" : value.toFixed(4); }
function gain(value) { return value === null ? "\u2013" : (value >= 0 ? "+" : "\u2212") + Math.abs(value).toFixed(4); }
function time(s) {
  if (s === null) return "\u2013";
  s = Math.max(s, 0);
  if (s < 120) return s.toFixed(s < 10 ? 1 : 0) + " s";
  return s < 7200 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
}
function size(bytes) {
  return bytes >= 1e9 ? (bytes / 1e9).toFixed(2) + " GB" : bytes >= 1e6 ? (bytes / 1e6).toFixed(1) + " MB"
    : (bytes / 1e3).toFixed(1) + " kB";
}
function now() { return Date.now() / 1000 + skew; }

function table(node, heads, rows) {
  node.tHead.replaceChildren(document.createElement("tr"));
  for (const head of heads) {
    const cell = make("th", head);
    cell.scope = "col";
    node.tHead.rows[0].append(cell);
  }
  node.tBodies[0].replaceChildren(...rows.map(cells => {
    const row = document.createElement("tr");
    cells.forEach(([text, kind], i) => {
      const cell = make(i ? "td" : "th", text, kind);
      if (!i) cell.scope = "row";
      row.append(cell);
    });
    return row;
  }));
}

function silos(run) {
  const epsilon = run.silos.some(s => s.epsilon !== null), word = run.score || "score";
  const heads = ["silo", "now", "last reply", "validation " + word, "test " + word, "gain over local", "missed"];
  if (epsilon) heads.push("epsilon");
  heads.push("left out or bounded");
  table(at("silos"), heads, run.silos.map(s => {
    const doing = s.doing ? s.doing + (s.since ? " " + time(now() - s.since) : "") : "\u2013";
    const cells = [[s.name], [doing, s.doing === "late" ? "bad" : ""], [time(s.seconds)], [score(s.validation)],
      [score(s.test)], [gain(s.gain), s.gain === null ? "" : s.gain < 0 ? "bad" : "good"], [String(s.missed)]];
    if (epsilon) cells.push([s.epsilon === null ? "\u2013" : s.epsilon.toPrecision(3)]);
    cells.push([s.left_out || s.bounded, s.left_out ? "text bad" : "text"]);
    return cells;
  }));
}

function curve(run) {
  const svg = at("curve"), points = run.curve, space = "http://www.w3.org/2000/svg";
  at("curve-part").hidden = points.length < 2;
  if (points.length < 2) return;
  const values = points.flatMap(p => [p[1], p[2]]).filter(v => v !== null);
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const first = points[0][0], last = points[points.length - 1][0];
  const x = r => 44 + 550 * (r - first) / (last - first || 1), y = v => 140 - 125 * (v - low) / span;
  const nodes = [["val", 1], ["test", 2]].map(([kind, i]) => {
    const line = document.createElementNS(space, "polyline");
    line.setAttribute("class", kind);
    const known = points.filter(p => p[i] !== null);
    line.setAttribute("points", known.map(p => x(p[0]).toFixed(1) + "," + y(p[i]).toFixed(1)).join(" "));
    return line;
  });
  const ends = [[high.toFixed(3), 0, 18], [low.toFixed(3), 0, 143], ["round " + first, 44, 157], ["" + last, 570, 157]];
  for (const [text, left, top] of ends) {
    const node = document.createElementNS(space, "text");
    node.setAttribute("x", left);
    node.setAttribute("y", top);
    node.textContent = text;
    nodes.push(node);
  }
  svg.replaceChildren(...nodes);
}

function clock() {
  if (picture === null || picture.run === null) return;
  const run = picture.run;
  const round = "round " + run.round + " of " + run.rounds;
  const where = run.closing && run.state === "running" ? "closing evaluation" : round;
  const next = run.begun ? ", the next one for " + time(now() - run.begun)
    : run.heard ? ", last message " + time(now() - run.heard) + " ago" : "";
  put(at("head"), run.strategy + ", seed " + run.seed + ": " + run.state + ", " + where + next);
  silos(run);
}

function draw() {
  const run = picture.run;
  put(at("title"), picture.title + (picture.site ? " \u2013 this site's own row" : ""));
  const ending = picture.certificates.filter(end => !end.check.ok).map(end => end.check);
  put(at("ends"), ending.map(c => c.name + ": " + c.detail + "; " + c.fix).join(". "));
  document.title = (run ? run.round + "/" + run.rounds + " " : "") + picture.title;
  for (const part of ["silo-part", "curve-part"]) at(part).hidden = run === null;
  at("run-part").hidden = picture.runs.length < 2;
  at("note-part").hidden = picture.notes.length === 0;
  at("notes").replaceChildren(...picture.notes.map(n => make("li", (n.time + " " + n.text).trim())));
  if (run === null) {
    const refused = picture.site ? "; silofl audit has messages that were refused" : "";
    put(at("head"), picture.fault || "no run has begun" + refused);
    return;
  }
  clock();
  curve(run);
  put(at("why"), run.why);
  put(at("transfer"), run.transfer);
  at("bar").value = run.rounds ? run.round / run.rounds : 0;
  const tiles = [["round takes", time(run.pace)], ["to the end", time(run.left)], ["all rounds so far", time(run.took)],
    ["bytes", size(run.bytes)], ["best round", run.best_when || "\u2013"],
    ["its mean validation " + (run.score || "score"), score(run.best_validation)],
    ["its mean test " + (run.score || "score"), score(run.best_test)], ["its mean gain over local", gain(run.gain)]];
  at("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(make("dt", name), make("dd", value));
    return tile;
  }));
  table(at("runs"), ["method", "seed", "state", "rounds", "best round", "validation", "test", "gain over local"],
    picture.runs.map(r => [[r.strategy], [String(r.seed)], [r.state, r.state === "failed" ? "bad" : ""],
      [r.round + "/" + r.rounds],
      [r.best_when || "\u2013"], [score(r.best_validation)], [score(r.best_test)], [gain(r.gain)]]));
}

function status(lost) {
  const line = at("line");
  line.className = lost ? "lost" : "";
  const when = picture ? " The picture is of " + new Date(picture.now * 1000).toLocaleTimeString() + "." : "";
  const goes = !picture || picture.runs.length === 0 || picture.runs.some(r => r.state === "running");
  const news = goes ? "live" : "ended; this page follows if it goes on";
  line.textContent = lost ? "The connection is lost; tries again." + when : news;
}

function connect() {
  stream = new EventSource("events");
  stream.onmessage = message => {
    picture = JSON.parse(message.data);
    skew = picture.now - Date.now() / 1000;
    status(picture.fault !== "");
    if (picture.fault) at("line").textContent = picture.fault;
    draw();
  };
  stream.onopen = () => status(false);
  stream.onerror = () => {
    status(true);
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 1000);
  };
}
setInterval(clock, 1000);
connect();
