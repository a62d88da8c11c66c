// Times one product: node kernels.mjs MODULE.wasm WEIGHTS ACTIVATIONS TYPE COLS ROWS TIMES BATCH…
import fs from "node:fs";

const [, , modulePath, weightsPath, activationsPath, ...numbers] = process.argv;
const [type, cols, rows, times, ...batches] = numbers.map(Number);
const { exports } = new WebAssembly.Instance(new WebAssembly.Module(fs.readFileSync(modulePath)), {});
const [weights, activations] = [fs.readFileSync(weightsPath), fs.readFileSync(activationsPath)];
const engine = exports.engine_create(2 ** 30);
const most = Math.max(...batches);
if (exports.engine_reserve_arena(engine, weights.length + activations.length + 4 * most * rows + 256) < 0) {
  throw new Error("the arena could not be reserved");
}
const at = exports.engine_arena_at(engine);
const x = at + Math.ceil(weights.length / 64) * 64;
const y = x + activations.length;
const memory = new Uint8Array(exports.memory.buffer, exports.engine_base(engine));
memory.set(weights, at);
memory.set(activations, x);

const seconds = {};
for (const batch of batches) {
  const once = () => {
    if (exports.matmul_block(engine, type, cols, rows, at, weights.length, batch, x, y) < 0) {
      throw new Error(`type ${type}, ${batch} rows`);
    }
  };
  // Long enough for V8 to have compiled what is hot.
  for (let began = performance.now(), runs = 0; performance.now() - began < 300 || runs < 3; runs++) once();
  const found = [];
  for (let i = 0; i < times; i++) {
    const began = process.cpuUsage();
    once();
    const used = process.cpuUsage(began);
    found.push((used.user + used.system) / 1e6);
  }
  seconds[batch] = found.sort((a, b) => a - b)[times >> 1];
}
console.log(JSON.stringify(seconds));
