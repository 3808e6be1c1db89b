// What the programs of this folder share: see ../checks.py.

export const QUESTION = "Where is the ferry?";
export const [WRITER, SMALL] = ["gpt-4o", "gpt-4o-mini"];

export async function run(checks) {
  for (const [what, check] of Object.entries(checks)) {
    let error = null;
    try {
      await check();
    } catch (failed) {
      error = `${failed.name}: ${failed.message}`;
    }
    console.log(JSON.stringify({ what, error }));
  }
}
