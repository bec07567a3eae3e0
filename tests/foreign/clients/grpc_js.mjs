// gRPC for Node with the proto files alone: a call of a tool, parsed by the router.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [address, protos, folder] = process.argv.slice(2);
const { resolve } = createRequire(`${folder}/`);
const load = async (name) => (await import(pathToFileURL(resolve(name)).href)).default;
const grpc = await load("@grpc/grpc-js");
const { loadSync } = await load("@grpc/proto-loader");

const definition = loadSync("kvrelay/v1/inference.proto", { includeDirs: [protos], keepCase: true, longs: Number, enums: String });
const { InferenceService } = grpc.loadPackageDefinition(definition).kvrelay.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", minimum: 0, maximum: 99 } },
      required: ["name", "age"],
      additionalProperties: false,
    },
  },
};
const sampling = { temperature: 1, seed: 1, max_tokens: 400 };

async function generate(request) {
  const messages = [];
  for await (const message of client.Generate(request)) messages.push(message);
  return messages;
}

const cases = {
  async streamed_tool() {
    const chat = {
      messages: [{ role: "user", content: "What is the weather?" }],
      tools: [JSON.stringify(tool)],
      tool_choice: { kind: "TOOL_CHOICE_KIND_NAMED", name: "get_weather" },
      parse_answer: true,
    };
    const deltas = (await generate({ chat, sampling })).flatMap((message) => message.tokens?.messages ?? []);
    const calls = deltas.flatMap((delta) => delta.tool_calls);
    const begun = calls.filter((call) => call.name);
    return {
      names: begun.map((call) => call.name),
      ids: begun.map((call) => call.id),
      arguments: JSON.parse(calls.map((call) => call.arguments).join("")),
      deltas: deltas.length,
    };
  },
  async embedding() {
    const { embedding } = await new Promise((resolve, reject) =>
      client.Embed({ text: "the sea" }, (error, reply) => (error ? reject(error) : resolve(reply))),
    );
    return embedding.length / 4;
  },
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    outcomes[name] = { saw: await run() };
  } catch (error) {
    outcomes[name] = { error: error.stack };
  }
}
client.close();
console.log(JSON.stringify(outcomes));
