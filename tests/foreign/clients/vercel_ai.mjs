// Vercel's AI SDK: objects by a schema, and a stream with tools.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [baseURL, folder] = process.argv.slice(2);
const { resolve } = createRequire(`${folder}/`);
const load = (name) => import(pathToFileURL(resolve(name)).href);
const { generateObject, streamText, stepCountIs, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const provider = createOpenAICompatible({
  name: "kvrelay", baseURL, apiKey: "any", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("fake");
const common = { model, prompt: "Who is it?", temperature: 1, maxOutputTokens: 400, maxRetries: 0 };
const person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(99) });

const cases = {
  async generate_object() {
    const { object } = await generateObject({ ...common, schema: person, seed: 1 });
    return object;
  },
  async stream_text_with_tools() {
    const tools = {
      get_weather: tool({ description: "Return the weather.", inputSchema: person, execute: async () => "sunny" }),
    };
    const result = streamText({
      ...common, tools, seed: 2, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
      onError: ({ error }) => { throw error; },
    });
    const kinds = {};
    for await (const part of result.fullStream) kinds[part.type] = (kinds[part.type] ?? 0) + 1;
    const steps = await result.steps;
    return {
      kinds,
      calls: steps[0].toolCalls.map((call) => ({ name: call.toolName, input: call.input })),
      prompts: steps.map((step) => step.usage.inputTokens),
    };
  },
};

const outcomes = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    outcomes[name] = { saw: await run() };
  } catch (error) {
    outcomes[name] = { error: `${error.stack}\n${error.responseBody ?? ""}` };
  }
}
console.log(JSON.stringify(outcomes));
