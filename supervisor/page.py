"""The endpoint's one page: self-contained, and only ever reads ``/status``."""

from __future__ import annotations

from typing import Final

PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>resilient-executor</title>
<style>
  body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
         color: #1c2430; background: #f6f7f9; }
  header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
  #state { padding: .1rem .7rem; border-radius: 1rem; color: #fff; background: #6b7280; font-weight: 600; }
  #state.HEALTHY { background: #15803d; } #state.RECOVERING, #state.SUSPECT { background: #b45309; }
  #state.FAILED { background: #b91c1c; }
  #facts { color: #566171; }
  .scroll { overflow-x: auto; background: #fff; border: 1px solid #dde1e7; border-radius: .5rem; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: left; padding: .35rem .8rem; white-space: nowrap; border-bottom: 1px solid #edf0f3; }
  th { color: #566171; font-weight: 600; } tr:last-child td { border-bottom: 0; }
  td.text { white-space: normal; min-width: 20rem; } .empty { padding: .6rem .8rem; color: #566171; }
  tr.late td { background: #fff4e5; }
</style>
<header><h1 id="name">resilient-executor</h1><span id="state">...</span><span id="facts"></span></header>
<h2>Ranks</h2><div class="scroll" id="ranks"></div>
<h2>Last incidents</h2><div class="scroll" id="incidents"></div>
<script>
  const $ = (id) => document.getElementById(id);
  function table(target, heads, rows, empty) {
    const box = $(target); box.replaceChildren();
    if (!rows.length) { const p = document.createElement("div"); p.className = "empty"; p.textContent = empty;
      box.append(p); return; }
    const t = document.createElement("table"), top = t.createTHead().insertRow(), body = t.createTBody();
    for (const head of heads) { const th = document.createElement("th"); th.textContent = head; top.append(th); }
    for (const row of rows) { const tr = body.insertRow(); if (row.late) tr.className = "late";
      for (const cell of row.cells) { const td = tr.insertCell(); td.textContent = cell;
        if (String(cell).length > 60) td.className = "text"; } }
    box.append(t);
  }
  const seconds = (s) => s < 0.0995 ? (1000 * s).toFixed(1) + " ms" : s.toFixed(1) + " s";
  async function show() {
    try {
      const d = await (await fetch("status", {cache: "no-store"})).json();
      $("name").textContent = d.name || "resilient-executor";
      $("state").textContent = d.state; $("state").className = d.state;
      document.title = d.state + " - " + (d.name || "resilient-executor");
      $("facts").textContent = d.driver ? "epoch " + d.epoch + (d.phase ? ", phase " + d.phase : "")
        + ", restarts " + d.restarts.used + " of " + d.restarts.max
        + (d.standbys.ready ? ", standbys " + d.standbys.ready + " ready" : "") + ", driver " + d.driver.pid
        + (d.driver.silent_s > 3 ? " silent for " + seconds(d.driver.silent_s) : "") : "";
      table("ranks", ["rank", "node", "devices", "pid", "phase", "doing", "heartbeat", "round trip", "suspicion"],
        d.ranks.map((r) => ({late: r.heartbeat_age_s > 2, cells: [r.rank, r.node, r.devices.join(",") || "CPU", r.pid,
          r.phase, r.doing, seconds(r.heartbeat_age_s) + " ago", seconds(r.round_trip_s), r.suspicion.toFixed(1)]})),
        "no workers now");
      table("incidents", ["no.", "epoch", "first cause", "outcome", "outage"],
        d.incidents.slice().reverse().map((i) => ({cells: [i.number, i.epoch, i.cause, i.outcome,
          i.duration_s === null ? "-" : seconds(i.duration_s)]})), "none");
    } catch (error) { $("state").textContent = "unreachable"; $("state").className = ""; }
    setTimeout(show, 1000);
  }
  show();
</script>
</html>
"""
