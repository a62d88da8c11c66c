// Replays what an engine was told (one JSON array a line on stdin) with a wasm module, and times what is marked:
// node replay.mjs MODULE.wasm MODEL.gguf
import fs from "node:fs";

const [, , modulePath, modelPath] = process.argv;
const LIMIT = 2 ** 31 - 1;
const model = fs.openSync(modelPath);
const module = new WebAssembly.Module(fs.readFileSync(modulePath));
// An instance for each engine, as in a cluster.
const engines = [0, 1].map(() => {
  const { exports } = new WebAssembly.Instance(module, {});
  return { exports, handle: exports.engine_create(LIMIT) };
});
const region = ({ exports, handle }) =>
  new Uint8Array(exports.memory.buffer, exports.engine_base(handle), exports.engine_region_bytes(handle));

const seconds = { wall: {}, processor: {} };
let began;
for (const line of fs.readFileSync(0, "utf8").split("\n")) {
  const [what, index, ...rest] = JSON.parse(line);
  const engine = engines[index];
  if (what === "call") {
    const [name, ...args] = rest;
    const result = engine.exports[name](engine.handle, ...args);
    if (result < 0) {
      const length = engine.exports.engine_error(engine.handle);
      throw new Error(`${name}: ${Buffer.from(region(engine).subarray(0, length)).toString()}`);
    }
  } else if (what === "write") {
    region(engine).set(Buffer.from(rest[1], "hex"), rest[0]);
  } else if (what === "load") {
    const [at, from, length] = rest;
    if (fs.readSync(model, region(engine), at, length, from) !== length) throw new Error("the model is short");
  } else if (what === "begin") {
    began = [performance.now(), process.cpuUsage()];
  } else if (what === "end") {
    const used = process.cpuUsage(began[1]);
    (seconds.wall[index] ??= []).push((performance.now() - began[0]) / 1e3);
    (seconds.processor[index] ??= []).push((used.user + used.system) / 1e6);
  } else {
    throw new Error(`a log says ${what}`);
  }
}
console.log(JSON.stringify(seconds));
