// A second place for the engine's WebAssembly: a JavaScript Worker in front of which a station or a shard stands
// when its own isolate may not hold it. Each of them has a Worker like this one to itself, by its binding ENGINE.
//
// Weights come as streams that are passed on to here, and go into memory by BYOB, as in `boundary.js`.

import { DurableObject } from "cloudflare:workers";
import pipeline from "./pipeline.wasm";

const PIECE = 256 * 1024;
// Calls after which the region lies elsewhere and has another size.
const MOVING = new Set(["engine_reserve_arena", "station_configure", "shard_configure"]);

// An engine outlives the object that made it, as a Python isolate's does; it is lost with the isolate.
const engines = new Map();

class Engine {
  constructor(limit) {
    this.limit = limit;
    this.token = crypto.randomUUID();
    this.exports = new WebAssembly.Instance(pipeline, {}).exports;
    this.version = this.exports.engine_abi_version();
    this.handle = this.exports.engine_create(limit);
    this.bodies = new Map();
    this.look();
  }

  look() {
    this.base = this.exports.engine_base(this.handle) >>> 0;
    this.size = this.exports.engine_region_bytes(this.handle);
  }

  view(at, length) {
    if (at < 0 || length < 0 || at + length > this.size) {
      throw new RangeError(`${length} bytes at offset ${at} leave the engine's region`);
    }
    return new Uint8Array(this.exports.memory.buffer, this.base + at, length);
  }

  call(name, args) {
    const value = this.exports[name](this.handle, ...args);
    if (MOVING.has(name)) this.look();
    let sentence = "";
    if (value < 0) {
      const length = this.exports.engine_error(this.handle);
      if (length > 0) sentence = new TextDecoder().decode(this.view(0, length));
    }
    return { value, sentence, memory: this.exports.memory.buffer.byteLength, size: this.size };
  }
}

/** The engine of one station or shard. */
export class EngineObject extends DurableObject {
  /** Makes the engine unless it is there; a token names this one and no other. */
  async make(limit) {
    const id = String(this.ctx.id);
    let engine = engines.get(id);
    if (!engine || engine.limit !== limit) {
      engine = new Engine(limit);
      engines.set(id, engine);
    }
    return { token: engine.token, version: engine.version, handle: engine.handle, size: engine.size };
  }

  engine(token) {
    const engine = engines.get(String(this.ctx.id));
    if (engine?.token !== token) throw new Error("the engine is gone");
    return engine;
  }

  /** Writes what was to be written, then calls. */
  async call(token, writes, name, args) {
    const engine = this.engine(token);
    for (const [at, bytes] of writes) engine.view(at, bytes.byteLength).set(bytes);
    return engine.call(name, args);
  }

  /** Writes what was to be written, then reads. */
  async read(token, writes, at, length) {
    const engine = this.engine(token);
    for (const [where, bytes] of writes) engine.view(where, bytes.byteLength).set(bytes);
    return engine.view(at, length).slice();
  }

  /** Takes a body that others will ask for by its number. */
  async open(token, number, stream) {
    this.engine(token).bodies.set(number, { reader: stream.getReader({ mode: "byob" }), buffer: null });
  }

  /** Moves the next bytes of a body into memory; returns how many there were. */
  async pour(token, number, at, length) {
    const engine = this.engine(token);
    const body = engine.bodies.get(number);
    let done = 0;
    while (body && done < length) {
      const wanted = Math.min(PIECE, length - done);
      const buffer = body.buffer ?? new ArrayBuffer(PIECE);
      body.buffer = null;
      const { value, done: ended } = await body.reader.readAtLeast(wanted, new Uint8Array(buffer, 0, wanted));
      if (value) body.buffer = value.buffer;
      if (value?.byteLength) {
        engine.view(at + done, value.byteLength).set(value);
        done += value.byteLength;
      }
      if (ended) break;
    }
    return done;
  }

  /** Gives up the rest of a body. */
  async close(token, number) {
    const body = this.engine(token).bodies.get(number);
    this.engine(token).bodies.delete(number);
    await body?.reader.cancel().catch(() => {});
  }
}

export default {
  fetch() {
    return new Response("this Worker answers its binding only", { status: 404 });
  },
};
