// Runs Workers on workerd through Miniflare, for `knot/workerd.py`: a description in JSON on stdin, events as
// lines of JSON on stdout, and the end when stdin closes.

import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const say = (event) => process.stdout.write(JSON.stringify(event) + "\n");
const KINDS = { ".py": "PythonModule", ".js": "ESModule", ".wasm": "CompiledWasm" };

function moduleOf(name, file) {
  const sdk = name.startsWith("python_modules/");
  const kind = sdk && !name.endsWith(".py") ? "Data" : (KINDS[path.extname(name)] ?? "Data");
  const text = kind === "PythonModule" || kind === "ESModule";
  return { type: kind, path: name, contents: fs.readFileSync(file, text ? "utf8" : undefined) };
}

const DOOR = `
  export default {
    async fetch(request, env) {
      const url = new URL(request.url);
      const key = decodeURIComponent(url.pathname.slice(1));
      const bucket = env[url.searchParams.get("bucket") ?? ""];
      if (!bucket) return new Response("no such bucket", { status: 404 });
      if (request.method === "PUT") {
        const put = await bucket.put(key, request.body, { customMetadata: { mark: url.searchParams.get("mark") ?? "" } });
        return Response.json({ etag: put.etag, size: put.size });
      }
      if (request.method === "DELETE") return bucket.delete(key).then(() => new Response(null, { status: 204 }));
      const found = await bucket.head(key);
      return Response.json(found && { size: found.size, etag: found.etag, mark: found.customMetadata?.mark ?? "" });
    },
  };
`;

/** What the inspector says of every Worker's heap: the one view of its JavaScript memory from outside. */
async function heaps(given, inspector, collect) {
  const found = {};
  const targets = await (await fetch(new URL("/json", inspector))).json();
  for (const { name } of given.workers) {
    const target = targets.find(({ id, title }) => id.endsWith(name) || title?.endsWith(name));
    if (!target) throw new Error(`the inspector has no ${name}: ${JSON.stringify(targets)}`);
    const socket = new WebSocket(target.webSocketDebuggerUrl);
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onerror = () => reject(new Error(`the inspector of ${name} does not answer`));
    });
    found[name] = await new Promise((resolve) => {
      socket.onmessage = ({ data }) => {
        const message = JSON.parse(data);
        if (message.id === 1) resolve(message.result ?? message.error);
      };
      if (collect) socket.send(JSON.stringify({ id: 0, method: "HeapProfiler.collectGarbage" }));
      socket.send(JSON.stringify({ id: 1, method: "Runtime.getHeapUsage" }));
    });
    socket.close();
  }
  return found;
}

async function main() {
  const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const given = JSON.parse((await lines.next()).value);
  const require = createRequire(path.join(given.node_modules, "x.js"));
  const { Miniflare, Log, LogLevel } = await import(pathToFileURL(require.resolve("miniflare")));
  const date = given.compatibility_date;
  const direct = (port) => [{ host: "127.0.0.1", port }];
  const workers = given.workers.map((worker) => ({
    name: worker.name,
    modules: Object.entries(worker.modules).map(([name, file]) => moduleOf(name, file)),
    compatibilityDate: date,
    compatibilityFlags: worker.flags,
    bindings: worker.vars,
    r2Buckets: worker.r2,
    kvNamespaces: worker.kv,
    serviceBindings: Object.fromEntries(
      Object.entries(worker.services).map(([name, found]) => {
        const [service, entrypoint] = found.split("#");
        return [name, entrypoint ? { name: service, entrypoint } : service];
      }),
    ),
    durableObjects: Object.fromEntries(
      Object.entries(worker.objects).map(([name, [className, scriptName]]) => [
        name,
        { className, useSQLite: true, ...(scriptName ? { scriptName } : {}) },
      ]),
    ),
    unsafeDirectSockets: direct(worker.port),
  }));
  const buckets = [...new Set(given.workers.flatMap((worker) => Object.values(worker.r2)))];
  const door = {
    name: "door",
    modules: [{ type: "ESModule", path: "door.js", contents: DOOR }],
    compatibilityDate: date,
    r2Buckets: Object.fromEntries(buckets.map((name) => [name, name])),
    unsafeDirectSockets: direct(0),
  };
  const miniflare = new Miniflare({
    log: new Log(LogLevel.ERROR),
    handleRuntimeStdio: (stdout, stderr) => {
      stdout.on("data", (data) => process.stderr.write(data));
      stderr.on("data", (data) => process.stderr.write(data));
    },
    inspectorPort: 0,
    r2Persist: path.join(given.data, "r2"),
    kvPersist: path.join(given.data, "kv"),
    durableObjectsPersist: path.join(given.data, "objects"),
    workers: [door, ...workers],
  });
  try {
    await miniflare.ready;
    const addresses = {};
    for (const worker of [{ name: "door" }, ...given.workers]) {
      addresses[worker.name] = (await miniflare.unsafeGetDirectURL(worker.name)).origin;
    }
    const inspector = String(await miniflare.getInspectorURL()).replace(/^ws/, "http");
    say({ event: "ready", addresses });
    for (;;) {
      const line = await lines.next();
      if (line.done) break;
      if (line.value === "heap") say({ event: "heap", workers: await heaps(given, inspector, false) });
      if (line.value === "live") say({ event: "live", workers: await heaps(given, inspector, true) });
    }
  } catch (error) {
    say({ event: "failed", error: String(error?.stack ?? error) });
    process.exitCode = 1;
  } finally {
    await miniflare.dispose();
  }
}

process.on("SIGINT", () => {}); // whoever started this closes stdin
await main();
process.exit();
