// Curves as the server thins them: mean, least and greatest of `every` neighbours.

export class Curves {
  constructor() {
    this.every = 1;
    this.x = [];
    this.fields = {};
    this.version = 0;
  }

  // body: {from, every, x, fields: {name: {mean, low, high}}}; all from `from` on is replaced.
  apply(body) {
    const kept = body.every === this.every ? lowerBound(this.x, body.from) : 0;
    this.every = body.every;
    this.x = this.x.slice(0, kept).concat(body.x);
    for (const name of new Set([...Object.keys(this.fields), ...Object.keys(body.fields)])) {
      const [old, added] = [this.fields[name], body.fields[name]];
      this.fields[name] = {};
      for (const part of ["mean", "low", "high"]) {
        const before = old ? old[part].slice(0, kept) : new Array(kept).fill(null);
        const after = added ? added[part] ?? added.mean : new Array(body.x.length).fill(null);
        this.fields[name][part] = before.concat(after);
      }
    }
    this.version += 1;
  }

  // What a chart draws of one figure, or null; every > 1: least and greatest may differ from the mean.
  line(field) {
    const found = this.fields[field];
    return found ? { x: this.x, every: this.every, version: this.version, ...found } : null;
  }
}

function lowerBound(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// The mean of the neighbours up to a sixtieth of the curve to either side, fewer where there are fewer.
export function smoothed(values) {
  const reach = Math.max(2, Math.round(values.length / 60));
  const [sums, counts] = [[0], [0]];
  values.forEach((value, i) => {
    sums.push(sums[i] + (value ?? 0));
    counts.push(counts[i] + (value === null ? 0 : 1));
  });
  return values.map((value, i) => {
    if (value === null) return null;
    const near = Math.min(reach, i, values.length - 1 - i);
    return (sums[i + near + 1] - sums[i - near]) / (counts[i + near + 1] - counts[i - near]);
  });
}
