// What the programs of this folder share: see ../checks.py.

export const QUESTION = "Where is the ferry?";
export const EMBEDDER = "text-embedding-3-small";

// Pairs of models by the API that their provider speaks. A call through another door is translated.
export const CHAT = { writer: "gpt-4o", small: "gpt-4o-mini" };
export const RESPONSES = { writer: "gpt-5", small: "gpt-5-mini" };
export const MESSAGES = { writer: "claude-opus-4-5", small: "claude-haiku-4-5" };

// Runs the checks of a door, and prints of each a line of JSON.
export async function run(door, checks) {
  for (const [what, check] of Object.entries(checks)) {
    let error = null;
    try {
      await check();
    } catch (failed) {
      error = `${failed.name}: ${failed.message}`;
    }
    console.log(JSON.stringify({ what, door, error }));
  }
}

// Checks that run with each of some models; an error names the models.
export const each = (models, checks) =>
  Object.fromEntries(
    Object.entries(checks).map(([what, check]) => [
      what,
      async () => {
        const failed = [];
        for (const one of models)
          await check(one).catch(({ name, message }) => failed.push(`${one.writer ?? one.modelId}: ${name}: ${message}`));
        if (failed.length) throw new Error(failed.join("; "));
      },
    ]),
  );
