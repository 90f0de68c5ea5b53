// Training from an artifact that `onnxremat compile --target onnxruntime` wrote.
//
// Every output of the training model but the loss is the next value of one of its inputs (`writes` in the manifest). So both are given
// the same array: a step reads the parameters from it and leaves the new ones there, and nothing is copied.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import ort from "onnxruntime-node";

import { TensorFile, zeros } from "./safetensors.mjs";

const LEVELS = { ORT_DISABLE_ALL: "disabled", ORT_ENABLE_BASIC: "basic", ORT_ENABLE_EXTENDED: "extended", ORT_ENABLE_ALL: "all" };
/** Elements that an optimizer model updates at a time: what it needs is bounded by this, however large a parameter is. */
const SLICE = 1 << 16;
/** Bytes of returned copies after which they are collected. */
const GARBAGE = 1 << 22;

// The binding also returns a copy of every output, even of those that are written to an array of ours. Nobody reads them; unless they are
// collected at once, V8 lets them pile up beside the step. Those of a large step count as old by then.
setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc");

async function collectCopies(bytes) {
  await new Promise(setImmediate); // the event loop still holds the last run's until its turn is over
  if (bytes <= GARBAGE) return collect({ type: "minor" });
  const wanted = process.memoryUsage().arrayBuffers - bytes;
  collect(); // a thread gives the memory back
  for (let turn = 0; turn < 200 && process.memoryUsage().arrayBuffers > wanted; turn++) await new Promise((resolve) => setTimeout(resolve, 1));
}

const bytesOf = (fetches) => Object.values(fetches).reduce((sum, tensor) => sum + (tensor?.data.byteLength ?? 0), 0);

/** The session options of the manifest, as far as JavaScript has them; what it lacks is expressed by the graph itself. */
function sessionOptions(manifest, threads) {
  const wanted = manifest.session_options;
  return {
    graphOptimizationLevel: LEVELS[wanted.graph_optimization_level],
    executionMode: wanted.execution_mode === "ORT_PARALLEL" ? "parallel" : "sequential",
    enableMemPattern: wanted.enable_mem_pattern,
    // The arena that the manifest describes can't be registered from JavaScript, and the default one takes more than the step needs.
    enableCpuMemArena: false,
    extra: wanted.config,
    intraOpNumThreads: threads ?? manifest.threads,
    logSeverityLevel: 3,
  };
}

export class Trainer {
  /** Open an artifact; `threads` of a step, 0 for all cores, by default as many as it was compiled for. */
  static async load(folder, { threads } = {}) {
    const trainer = new Trainer();
    await trainer.#load(folder, threads);
    return trainer;
  }

  async #load(folder, threads) {
    const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"));
    if (manifest.format !== "onnxremat-artifact" || manifest.target !== "onnxruntime" || !manifest.optimizer_models)
      throw new Error(`${folder} is no artifact for any ONNX Runtime: compile with --target onnxruntime`);
    const options = sessionOptions(manifest, threads);
    this.manifest = manifest;
    this.learningRate = manifest.optimizer.learning_rate;
    this.stepsDone = 0;
    this.checkpoint = new TensorFile(join(folder, "checkpoint.safetensors"));
    this.session = await ort.InferenceSession.create(join(folder, "training_model.onnx"), options);

    /** Input of the training model -> { type, shape, data }. */
    this.inputs = {};
    this.feeds = {};
    for (const { name, type, shape } of this.session.inputMetadata) {
      const data = zeros(type, shape);
      if (this.checkpoint.has(name)) this.checkpoint.read(name, data);
      this.inputs[name] = { type, shape, data };
      this.feeds[name] = new ort.Tensor(type, data, shape);
    }
    const specs = [...manifest.inputs, ...manifest.labels]; // name=shape:dtype
    this.batch = specs.map((text) => text.slice(0, text.indexOf("="))).filter((name) => this.inputs[name]);
    this.fetches = {};
    for (const name of this.session.outputNames) this.fetches[name] = this.feeds[manifest.writes[name]] ?? null;

    /** Parameter -> what collects its gradient; empty where the update is part of the training model. */
    this.gradients = {};
    this.updates = [];
    for (const [file, { parameters, writes }] of Object.entries(manifest.optimizer_models)) {
      const session = await ort.InferenceSession.create(join(folder, file), options);
      for (const [name, gradient] of Object.entries(parameters)) {
        this.gradients[name] = this.inputs[gradient].data;
        this.#prepareUpdate(session, writes, name);
      }
    }
  }

  /** The runs of an optimizer model that update a parameter, slice by slice. */
  #prepareUpdate(session, writes, name) {
    const { data } = this.inputs[name];
    const known = new Set(["learning_rate", "step", "params", "gradients"]);
    const moments = session.inputNames.filter((input) => !known.has(input)).map((input) => [input, zeros("float32", [data.length])]);
    const arrays = { params: data, gradients: this.gradients[name], ...Object.fromEntries(moments) };
    for (let start = 0; start < data.length; start += SLICE) {
      const feeds = {};
      for (const [input, array] of Object.entries(arrays)) {
        const slice = array.subarray(start, start + SLICE);
        feeds[input] = new ort.Tensor("float32", slice, [slice.length]);
      }
      const fetches = Object.fromEntries(Object.entries(writes).map(([output, input]) => [output, feeds[input]]));
      this.updates.push({ session, feeds, fetches });
    }
  }

  /** One step; `fill(name, array)` puts the batch into the arrays of the model's inputs and labels. Returns the loss. */
  async step(fill) {
    for (const name of this.batch) fill(name, this.inputs[name].data);
    for (const gradient of Object.values(this.gradients)) gradient.fill(0); // the model adds to what is there
    const number = BigInt(this.stepsDone + 1);
    if (this.inputs.learning_rate) this.inputs.learning_rate.data[0] = this.learningRate;
    if (this.inputs.optimizer_step) this.inputs.optimizer_step.data[0] = number;
    const loss = await this.#forwardAndBackward(); // in a function of its own, so that its copies are garbage here
    await collectCopies(bytesOf(this.fetches));

    this.#clip(this.manifest.optimizer.clip_grad_norm);
    const rate = new ort.Tensor("float32", new Float32Array([this.learningRate]), [1]);
    const step = new ort.Tensor("int64", new BigInt64Array([number]), [1]);
    let garbage = 0;
    for (const { session, feeds, fetches } of this.updates) {
      const scalars = session.inputNames.includes("step") ? { learning_rate: rate, step } : { learning_rate: rate };
      await session.run({ ...feeds, ...scalars }, fetches);
      garbage += bytesOf(fetches);
      if (garbage < GARBAGE) continue;
      await collectCopies(garbage);
      garbage = 0;
    }
    if (garbage) await collectCopies(garbage);
    this.stepsDone += 1;
    return loss;
  }

  async #forwardAndBackward() {
    const results = await this.session.run(this.feeds, this.fetches);
    return results[this.manifest.roles.loss].data[0];
  }

  /** Scale the gradients to the largest norm; 0 leaves them. An update inside the training model clips by itself. */
  #clip(largest) {
    const gradients = Object.values(this.gradients);
    if (!largest || !gradients.length) return;
    let squares = 0;
    for (const gradient of gradients) for (const value of gradient) squares += value * value;
    const scale = Math.fround(largest / (Math.sqrt(squares) + 1e-6));
    if (scale < 1) for (const gradient of gradients) for (let i = 0; i < gradient.length; i++) gradient[i] *= scale;
  }

  /** Write parameters and state into a file like the artifact's `checkpoint.safetensors`. */
  save(path) {
    this.checkpoint.rewrite(path, Object.fromEntries(Object.keys(this.checkpoint.header).map((name) => [name, this.#valueOf(name)])));
  }

  #valueOf(name) {
    if (this.inputs[name]) return this.inputs[name].data;
    const { type, shape } = this.checkpoint.describe(name); // of the evaluation alone
    const array = zeros(type, shape);
    this.checkpoint.read(name, array);
    return array;
  }
}
