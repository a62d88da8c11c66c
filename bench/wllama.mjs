// Speeds of wllama in Node: node wllama.mjs PACKAGE MODEL.gguf PROMPT DECODE TIMES
// It is made for browsers: their Worker is one of Node's here, which gets its code as text.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { Worker as NodeWorker } from "node:worker_threads";

const [, , folder, modelPath, prompt, decode, times] = process.argv;

const codes = new Map();
URL.createObjectURL = (blob) => {
  const url = `blob:${codes.size}`;
  codes.set(url, blob);
  return url;
};
globalThis.Worker = class {
  constructor(url) {
    const before =
      "const { parentPort } = require('node:worker_threads'); globalThis.self = globalThis;" +
      "globalThis.postMessage = (data, list) => parentPort.postMessage(data, list);" +
      "parentPort.on('message', (data) => globalThis.onmessage({ data }));\n";
    this.ready = codes.get(url).text().then((code) => {
      this.worker = new NodeWorker(before + code.replaceAll(/^\s*onmessage = /gm, "globalThis.onmessage = "), { eval: true });
      this.worker.on("message", (data) => this.onmessage?.({ data }));
      this.worker.on("error", (error) => this.onerror?.(error));
    });
  }
  postMessage(data, list) {
    this.ready.then(() => this.worker.postMessage(data, list));
  }
  terminate() {
    this.ready.then(() => this.worker.terminate());
  }
};
// What is missing of a browser here.
globalThis.document ??= { baseURI: pathToFileURL(`${folder}/`).href };

const { Wllama } = await import(pathToFileURL(path.join(folder, "esm", "index.js")).href);
const quiet = { debug() {}, log() {}, warn() {}, error: console.error };
const wllama = new Wllama(
  { "single-thread/wllama.wasm": path.join(folder, "esm", "single-thread", "wllama.wasm") },
  { logger: quiet, suppressNativeLog: true },
);
await wllama.loadModel([await fs.openAsBlob(modelPath)], { n_threads: 1, n_ctx: 512, n_batch: 512, seed: 1 });
const ids = Array.from({ length: +prompt }, (_, i) => 300 + 7 * i);
const seconds = { wall: {}, processor: {} };
async function timed(name, body) {
  const [wall, processor] = [performance.now(), process.cpuUsage()];
  await body();
  const used = process.cpuUsage(processor);
  (seconds.wall[name] ??= []).push((performance.now() - wall) / 1e3);
  (seconds.processor[name] ??= []).push((used.user + used.system) / 1e6);
}
await wllama.decode(ids.slice(0, 8), {});
for (let i = 0; i < +times; i++) {
  await wllama.kvClear();
  await timed("prefill", () => wllama.decode(ids, {}));
  for (let k = 0; k < +decode; k++) await timed("decode", () => wllama.decode([ids[k]], {}));
}
console.log(JSON.stringify(seconds));
process.exit(0);
