// OpenAI's own JavaScript SDK against a local server: chat, streams, tools, speculation, predictions.
//
// Run: outrider serve, and in another terminal: npm install --no-save openai && node examples/openai_js.mjs
// OPENAI_BASE_URL and OPENAI_API_KEY say where else to go.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none",
});
const model = (await client.models.list()).data[0].id;

function ask(content) {
  return [{ role: "user", content }];
}

async function chat() {
  const answer = await client.chat.completions.create({
    model, messages: ask("What is the capital of France?"), temperature: 0.3, seed: 7, max_tokens: 32,
  });
  console.log(`chat: ${answer.choices[0].message.content}`);
  console.log(`      ${answer.usage.completion_tokens} tokens, seed ${answer.seed}\n`);
}

async function stream() {
  process.stdout.write("stream: ");
  const chunks = await client.chat.completions.create({
    model,
    messages: ask("Count to five."),
    temperature: 0,
    max_tokens: 32,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of chunks) {
    process.stdout.write(chunk.choices[0]?.delta.content ?? "");
    if (chunk.usage) console.log(`\n      ${chunk.usage.completion_tokens} tokens\n`);
  }
}

async function callATool() {
  const parameters = {
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Oslo", "Rome"] } },
    required: ["city"],
  };
  const answer = await client.chat.completions.create({
    model,
    messages: ask("Do I need an umbrella in Oslo?"),
    tools: [{ type: "function", function: { name: "get_weather", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  const { name, arguments: given } = answer.choices[0].message.tool_calls[0].function;
  console.log(`tool: ${name}(${JSON.stringify(JSON.parse(given))})\n`);
}

// Fields that OpenAI does not have are sent as they are.
async function speculate() {
  const texts = [];
  for (const how of [false, { drafter: "lookup", depth: 4, stats: true }]) {
    const answer = await client.chat.completions.create({
      model,
      messages: ask("Say 'one two three' ten times."),
      temperature: 0.3,
      seed: 7,
      max_tokens: 64,
      speculative_decoding: how,
    });
    texts.push(answer.choices[0].message.content);
    const report = answer.metrics.speculative_decoding;
    const guesses = `${report.num_accepted_draft_tokens} of ${report.num_draft_tokens} guesses held`;
    console.log(`speculation ${how ? "on" : "off"}: ${report.steps} steps, ${guesses}`);
  }
  console.log(`      the same text: ${texts[0] === texts[1]}\n`);
}

async function predict() {
  const code = "def area(radius):\n    return 3.14 * radius * radius\n";
  const answer = await client.chat.completions.create({
    model,
    messages: ask(`Rename radius to r, and answer with nothing but the code:\n${code}`),
    prediction: { type: "content", content: code },
    temperature: 0,
    max_tokens: 64,
  });
  const details = answer.usage.completion_tokens_details;
  console.log(`prediction: ${details.accepted_prediction_tokens} tokens of it came true, ` +
    `${details.rejected_prediction_tokens} did not\n${answer.choices[0].message.content}`);
}

for (const show of [chat, stream, callATool, speculate, predict]) await show();
