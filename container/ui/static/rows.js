// Which rows of many a picture of the batch shows.

// Returns the rows in the period, by id; if they are more than `most`, those nearest to its mark.
export function nearestRows(rows, { from, now, mark, selected }, most) {
  const found = rows.filter((row) => row.arrived < now && (row.end ?? now) > from);
  const distance = (row) => (row.id === selected ? -1 : Math.max(0, row.arrived - mark, mark - (row.end ?? now)));
  found.sort((a, b) => distance(a) - distance(b) || a.arrived - b.arrived);
  return new Map(found.slice(0, most).map((row) => [row.id, row]));
}
