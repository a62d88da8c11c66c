// What must be JavaScript: the engine's WebAssembly, and bodies that never become Python objects.
//
// Weights go from a stream into WebAssembly memory through one recycled buffer, by BYOB reads: one copy, and no
// garbage on the way. Everything else here saves the Python side from making JavaScript values piece by piece.

import { waitUntil } from "cloudflare:workers";

import pipeline from "./pipeline.wasm";
import relaxed from "./pipeline-relaxed.wasm";

const PIECE = 256 * 1024;

// One buffer a drain that is under way; the isolate seldom has more than two.
const idle = [];
let counted = 0;
let peak = 0;

function count(bytes) {
  counted += bytes;
  if (counted > peak) peak = counted;
}

function borrow() {
  const buffer = idle.pop();
  if (buffer) return buffer;
  count(PIECE);
  return new ArrayBuffer(PIECE);
}

function giveBack(buffer) {
  if (idle.length < 2 && buffer.byteLength === PIECE) idle.push(buffer);
  else count(-PIECE);
}

/** Bytes of buffers that this module holds now, and at most so far. */
export function buffers() {
  return [counted, peak];
}

/** Frees a buffer at once; the collector would take its time. */
export function free(view) {
  const size = view.byteLength;
  view.buffer.transfer(0);
  count(-size);
}

// Which build is faster depends on the processor, which relaxed SIMD alone can tell.
let faster = null;

/** One instance of the engine's module; memory never shrinks, and a view dies when it grows. */
export class Wasm {
  constructor() {
    let instance = faster === pipeline ? null : new WebAssembly.Instance(relaxed, {});
    faster ??= instance.exports.engine_relaxed_pays() ? relaxed : pipeline;
    if (faster === pipeline) instance = new WebAssembly.Instance(pipeline, {});
    this.exports = instance.exports;
    this.memory = instance.exports.memory;
  }

  view(at, length) {
    return new Uint8Array(this.memory.buffer, at, length);
  }

  bytes() {
    return this.memory.buffer.byteLength;
  }
}

/** A body on its way in, read once and in order. */
export class Inflow {
  constructor(stream, length) {
    this.stream = stream;
    this.left = length;
    this.reader = null;
    this.remote = null;
  }

  /** The stream itself, for somebody else to read. */
  handOn() {
    const stream = this.stream;
    this.stream = null;
    return stream;
  }

  /** Moves the next bytes into WebAssembly memory; returns how many there were. */
  async pour(wasm, at, length) {
    return this.fill(length, (piece, done) => {
      new Uint8Array(wasm.memory.buffer, at + done, piece.byteLength).set(piece);
    });
  }

  /** The next bytes as an array of their own; shorter at the body's end. */
  async read(length) {
    const found = new Uint8Array(length);
    count(length);
    const done = await this.fill(length, (piece, at) => found.set(piece, at));
    return done === length ? found : found.subarray(0, done);
  }

  async fill(length, take) {
    if (!this.stream) return 0;
    this.reader ??= this.stream.getReader({ mode: "byob" });
    let buffer = borrow();
    let done = 0;
    try {
      while (done < length) {
        const wanted = Math.min(PIECE, length - done);
        const view = new Uint8Array(buffer, 0, wanted);
        // The buffer belongs to the reader until it comes back, as another object.
        buffer = null;
        const { value, done: ended } = await this.reader.readAtLeast(wanted, view);
        if (value) buffer = value.buffer;
        if (value && value.byteLength) {
          take(value, done);
          done += value.byteLength;
          this.left -= value.byteLength;
        }
        if (ended) break;
      }
    } finally {
      if (buffer) giveBack(buffer);
      else count(-PIECE);
    }
    return done;
  }

  async cancel() {
    const stream = this.stream;
    this.stream = null;
    try {
      if (this.remote) {
        const { owner, number } = this.remote;
        this.remote = null;
        await owner.close(number);
      } else if (this.reader && this.left === 0) {
        // Whoever sends it waits for its end to be seen; cancelling would leave them waiting.
        await this.reader.read(new Uint8Array(1));
      } else if (this.reader) await this.reader.cancel();
      else if (stream) await stream.cancel();
    } catch {
      // A body that has broken off already needs no cancelling.
    }
  }
}

/** Bytes that are kept, from the moment when they begin to arrive; the caller accounts for them. */
export class Held {
  constructor(length) {
    this.buffer = new ArrayBuffer(length);
    this.length = length;
    this.there = 0;
    this.broken = null;
    this.readers = 0;
    this.dropped = false;
    this.waiting = [];
  }

  /** Keeps the next bytes of a body; returns how many there were. Stops early when nobody wants them. */
  async fill(inflow) {
    this.readers += 1;
    try {
      return await inflow.fill(this.length, (piece, at) => {
        if (this.dropped && this.readers === 1) throw new Error("nobody wants these bytes any more");
        new Uint8Array(this.buffer, at, piece.byteLength).set(piece);
        this.there = at + piece.byteLength;
        this.wake();
      });
    } catch (error) {
      this.broken = error;
      throw error;
    } finally {
      this.broken ??= this.there < this.length ? new Error("the body ended early") : null;
      this.wake();
      this.readers -= 1;
      this.release();
    }
  }

  wake() {
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  /** Waits until the bytes before `end` are there. Throws when they will not come. */
  async until(end) {
    for (;;) {
      if (!this.buffer) throw new Error("these bytes have been dropped");
      if (this.there >= end) return;
      if (this.broken) throw this.broken;
      await new Promise((resolve) => this.waiting.push(resolve));
    }
  }

  part(start, end) {
    return new Part(this, start, end);
  }

  drop() {
    this.dropped = true;
    this.release();
  }

  release() {
    if (this.dropped && this.readers === 0 && this.buffer) {
      this.buffer.transfer(0);
      this.buffer = null;
    }
  }
}

/** A stretch of kept bytes on its way out. */
class Part {
  constructor(held, at, end) {
    this.held = held;
    this.at = at;
    this.end = end;
    held.readers += 1;
  }

  /** Waits for some of the next bytes; whether there are any. */
  async ready(least) {
    if (!this.held || this.at >= this.end) return false;
    await this.held.until(Math.min(this.at + least, this.end));
    return true;
  }

  /** A look at the next bytes that are there, valid until something is awaited; null at the end. */
  next(most) {
    if (this.at >= this.end) {
      this.close();
      return null;
    }
    const size = Math.min(most, this.end - this.at, this.held.there - this.at);
    const view = new Uint8Array(this.held.buffer, this.at, size);
    this.at += size;
    return view;
  }

  /** The next bytes as an array of their own. */
  async read(length) {
    await this.ready(length);
    return this.next(length)?.slice() ?? new Uint8Array(0);
  }

  close() {
    if (!this.held) return;
    const held = this.held;
    this.held = null;
    this.at = this.end;
    held.readers -= 1;
    held.release();
  }
}

/** An engine in another Worker. What is written waits for the next call, and travels with it. */
export class Remote {
  constructor(namespace, limit) {
    this.namespace = namespace;
    this.limit = limit;
    this.writes = [];
    this.bodies = 0;
  }

  // A stub belongs to the object that made it; the engine outlives objects.
  get stub() {
    return this.namespace.get(this.namespace.idFromName("engine"));
  }

  async make() {
    const made = await this.stub.make(this.limit);
    this.token = made.token;
    return [made.version, made.handle, made.size];
  }

  write(at, bytes) {
    this.writes.push([at, bytes]);
  }

  taken() {
    return this.writes.splice(0);
  }

  async call(name, args) {
    const { value, sentence, memory, size } = await this.stub.call(this.token, this.taken(), name, JSON.parse(args));
    return [value, sentence, memory, size];
  }

  read(at, length) {
    return this.stub.read(this.token, this.taken(), at, length);
  }

  /** Moves the next bytes of a body there, which from then on belongs to the other side. */
  async pour(inflow, at, length) {
    if (!inflow.remote) {
      inflow.remote = { owner: this, number: ++this.bodies };
      await this.stub.open(this.token, inflow.remote.number, inflow.handOn());
    }
    return this.stub.pour(this.token, inflow.remote.number, at, length);
  }

  close(number) {
    return this.stub.close(this.token, number);
  }
}

/** Method, path, query and headers of a request as JSON; its body is read apart. */
export function callHead(request) {
  const url = new URL(request.url);
  return JSON.stringify([request.method, url.pathname, url.search.slice(1), [...request.headers]]);
}

/** A body as one array; null when there is none. Free it after use. */
export async function whole(message) {
  if (message.body === null) return null;
  const found = new Uint8Array(await message.arrayBuffer());
  count(found.byteLength);
  return found;
}

/** A response. `body` is null, an array that is nobody else's, or a stream. */
export function respond(status, headers, body) {
  return new Response(body, { status, headers: JSON.parse(headers) });
}

/**
 * A body made of pieces. `next` promises an array that is nobody else's, kept bytes, a stream to be passed on, or
 * nothing at the end; `stop` is called once, when it is over or nobody wants more.
 *
 * The pipe is native: what is kept is sent from where it lies, and streams pass without a JavaScript object a piece.
 */
export function pumped(next, stop, length) {
  const { readable, writable } = length >= 0 ? new FixedLengthStream(length) : new IdentityTransformStream();
  waitUntil(pump(writable, next, stop));
  return readable;
}

async function pump(writable, next, stop) {
  let writer = null;
  let part = null;
  try {
    for (;;) {
      const piece = await next();
      if (piece === null || piece === undefined) break;
      if (piece instanceof ReadableStream) {
        writer?.releaseLock();
        writer = null;
        await piece.pipeTo(writable, { preventClose: true });
        continue;
      }
      writer ??= writable.getWriter();
      if (!(piece instanceof Part)) {
        if (piece.byteLength) await writer.write(piece);
        continue;
      }
      part = piece;
      while (await part.ready(1)) await writer.write(part.next(PIECE));
      part.close();
      part = null;
    }
    writer ??= writable.getWriter();
    await writer.close();
  } catch (error) {
    // Whoever read it has gone, or a piece could not be had: either way the other side notices.
    part?.close();
    try {
      await (writer ?? writable.getWriter()).abort(error);
    } catch {
      // It is broken already.
    }
  } finally {
    await stop();
  }
}

/** A request to a Worker or an object, with a way to give it up. */
export class Asking {
  constructor(target, name, url, method, headers, body) {
    // A stub that has seen its object fail stays broken, so each request has its own.
    const fetcher = name == null ? target : target.get(target.idFromName(name));
    this.response = fetcher.fetch(url, {
      method,
      headers: JSON.parse(headers),
      body: body ?? undefined,
      redirect: "manual",
    });
  }

  giveUp() {
    // Signals do not cross between Workers; an answer that is not wanted is read by nobody.
    this.response.then((response) => response.body?.cancel()).catch(() => {});
  }
}

/** Status and headers of a response as JSON. */
export function replyHead(response) {
  return JSON.stringify([response.status, [...response.headers]]);
}

/** Hands a request on, untouched. */
export function forward(request, target, name) {
  return (name == null ? target : target.get(target.idFromName(name))).fetch(request);
}

/** Size and etag of an object in R2, as JSON; null when it is not there. */
export async function head(bucket, key) {
  const found = await bucket.head(key);
  return found && JSON.stringify([found.size, found.etag]);
}

/** A range of an object in R2: [state, etag, stream, bytes in the range]. */
export async function range(bucket, key, offset, length, etag) {
  const options = { range: { offset, length } };
  if (etag != null) options.onlyIf = { etagMatches: etag };
  const found = await bucket.get(key, options);
  if (found === null) return ["missing", "", null, 0];
  if (!found.body) return ["changed", found.etag, null, 0];
  const size = Math.min(found.range?.length ?? length, found.size - offset);
  return ["found", found.etag, found.body, size];
}

/** A value of KV or of an object's storage as one array; null when it is not there. */
export async function kvGet(namespace, key) {
  const found = await namespace.get(key, "arrayBuffer");
  if (found === null) return null;
  count(found.byteLength);
  return new Uint8Array(found);
}

export function kvPut(namespace, key, value, expirationTtl) {
  return namespace.put(key, value, { expirationTtl });
}

export async function storageGet(storage, key) {
  const found = await storage.get(key);
  if (found === undefined) return null;
  const view = found instanceof Uint8Array ? found : new Uint8Array(found);
  count(view.byteLength);
  return view;
}

export async function storageKeys(storage, prefix) {
  return JSON.stringify([...(await storage.list({ prefix })).keys()]);
}

/** Keeps an event alive until `settle` is called. */
export function keepAlive(ctx) {
  const { promise, resolve } = Promise.withResolvers();
  ctx.waitUntil(promise);
  return resolve;
}
