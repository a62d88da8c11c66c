// Asks a gateway with the official client for Node, and prints what it found as JSON.
import OpenAI from "openai";

const [url, model, said] = process.argv.slice(2);
const messages = JSON.parse(said);
const client = new OpenAI({ baseURL: url, maxRetries: 0 });

const models = [];
for await (const one of client.models.list()) models.push(one.id);

const asked = { model, messages, max_tokens: 6, temperature: 0 };
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const completion = await client.completions.create({ model, prompt: "def add(", max_tokens: 3 });

async function refused(client, more) {
  try {
    await client.chat.completions.create({ ...asked, ...more });
  } catch (error) {
    return error;
  }
  throw new Error("it was not refused");
}
const bad = await refused(client, { temperature: 3 });
const stranger = await refused(new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 }), {});

console.log(
  JSON.stringify({
    models,
    whole: whole.choices[0].message.content,
    streamed,
    completion: completion.choices[0].text,
    usage: whole.usage.total_tokens,
    error: { status: bad.status, param: bad.param, code: bad.code },
    stranger: { status: stranger.status, code: stranger.code },
  }),
);
