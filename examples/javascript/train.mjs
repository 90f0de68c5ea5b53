// Train a compiled artifact in Node.js; one loss a line.
//
//     node train.mjs ARTIFACT --data FILE [--steps N] [--threads N] [--save FILE] [--pause]
//
// The data file is a safetensors file with one tensor per input and label of the model, samples along the first axis; batches are taken in
// order, again and again. --save writes the trained parameters. --pause waits for Enter before the first step and after the last.

import { readSync } from "node:fs";
import { parseArgs } from "node:util";

import { TensorFile } from "./safetensors.mjs";
import { Trainer } from "./trainer.mjs";

const USAGE = "usage: node train.mjs ARTIFACT --data FILE [--steps N] [--threads N] [--save FILE] [--pause]";

function readArguments() {
  const text = { type: "string" };
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: { data: text, steps: text, threads: text, save: text, pause: { type: "boolean" } },
  });
  const [steps, threads] = [values.steps ?? "10", values.threads].map((given) => (given === undefined ? undefined : Number(given)));
  const whole = (number) => Number.isInteger(number) && number >= 0;
  if (positionals.length !== 1 || !values.data || !whole(steps) || !whole(threads ?? 0)) throw new Error("see above");
  return { artifact: positionals[0], ...values, steps, threads };
}

/** A function of the number of a step that fills the arrays of its batch; checks that the file suits the artifact. */
function openBatches(path, trainer) {
  const file = new TensorFile(path);
  const counts = trainer.batch.map((name) => {
    const { type, shape } = trainer.inputs[name];
    const found = file.describe(name);
    if (found.type !== type || String(found.shape.slice(1)) !== String(shape.slice(1)))
      throw new Error(`'${name}' in ${path} is ${found.type} [${found.shape}], the artifact wants ${type} [N,${shape.slice(1)}]`);
    return Math.floor(found.shape[0] / shape[0]);
  });
  const batches = Math.min(...counts);
  if (batches < 1) throw new Error(`${path} has fewer samples than a batch`);
  return (step) => (name, array) => file.read(name, array, (step % batches) * array.length);
}

function pause() {
  process.stderr.write(`paused: process ${process.pid}; press Enter\n`);
  readSync(0, new Uint8Array(1));
}

async function main({ artifact, data, steps, threads, save, pause: paused }) {
  const trainer = await Trainer.load(artifact, { threads });
  const batch = openBatches(data, trainer);
  if (paused) pause();
  for (let step = 0; step < steps; step++) console.log((await trainer.step(batch(step))).toPrecision(9));
  if (paused) pause();
  if (save) trainer.save(save);
}

let given;
try {
  given = readArguments();
} catch {
  console.error(USAGE);
  process.exit(2);
}
try {
  await main(given);
} catch (error) {
  console.error(`train.mjs: ${error.message}`);
  process.exit(1);
}
