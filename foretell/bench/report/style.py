"""The style sheet of a page: light and dark, eight colours for contenders."""

SERIES = 8  # colours, --s0 to --s7
STYLE = """
:root { color-scheme: light dark;
  --page: #fafaf8; --card: #fff; --ink: #22252a; --soft: #6a7078; --line: #dfe1e4;
  --good: #1f7a4a; --bad: #b4412f;
  --s0: #8a9099; --s1: #2f6fbb; --s2: #dd7f22; --s3: #3c9a63;
  --s4: #8a5fb0; --s5: #b8479a; --s6: #2a9d9d; --s7: #a4862a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #16181c; --card: #1e2126; --ink: #e4e6ea; --soft: #9aa1ab; --line: #363b43;
  --good: #61c48d; --bad: #ef8573;
  --s0: #8b929c; --s1: #6aa5ec; --s2: #f0a04f; --s3: #68c48d;
  --s4: #b491dc; --s5: #e184c4; --s6: #5cc9c9; --s7: #d2b552; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
p { margin: 4px 0 12px; }
.soft, small { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 22px; margin-top: 20px; overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 14px; margin-top: 20px; }
.tile { flex: 1 1 170px; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 14px 18px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td small { display: block; line-height: 1.2; }
thead th { color: var(--soft); font-weight: 500; }
td.best b { color: var(--good); }
.bad { color: var(--bad); }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 8px; }
svg { display: block; max-width: 100%; height: auto; margin-top: 8px; }
svg text { fill: var(--ink); paint-order: stroke; stroke: var(--card); stroke-width: 3px;
  stroke-linejoin: round; }
svg .soft { fill: var(--soft); }
details { margin-top: 8px; }
summary { cursor: pointer; }
details th, details td { font-size: 13px; padding: 4px 8px; }
details th, details td:last-child { white-space: normal; }
"""
