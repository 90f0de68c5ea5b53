// Tensors in a file: eight bytes with the length of a JSON header, the header with dtype, shape and place of each tensor, then the bytes
// (https://github.com/huggingface/safetensors#format). Tensors are read one at a time, so a file may be larger than memory.

import { closeSync, openSync, readSync, renameSync, writeSync } from "node:fs";

/** Name of a dtype in a file -> its array, its name in ONNX Runtime. Half floats have no array of their own in Node 20: their bits. */
const DTYPES = {
  F64: [Float64Array, "float64"],
  F32: [Float32Array, "float32"],
  F16: [Uint16Array, "float16"],
  I64: [BigInt64Array, "int64"],
  I32: [Int32Array, "int32"],
  U8: [Uint8Array, "uint8"],
  BOOL: [Uint8Array, "bool"],
};

/** An array of zeros for an ONNX Runtime type and a shape; its memory is there, not only promised. */
export function zeros(type, shape) {
  const found = Object.values(DTYPES).find(([, name]) => name === type);
  if (!found) throw new Error(`tensors of ${type} are not supported here`);
  const array = new found[0](shape.reduce((a, b) => a * b, 1));
  new Uint8Array(array.buffer).fill(0);
  return array;
}

export class TensorFile {
  constructor(path) {
    this.path = path;
    try {
      this.file = openSync(path, "r");
    } catch (error) {
      throw new Error(`${path} can't be read: ${error.message}`);
    }
    const length = new BigUint64Array(1);
    this.#read(length, 0);
    if (length[0] > 100_000_000n) throw new Error(`${path} is no safetensors file`);
    this.begin = 8 + Number(length[0]);
    const text = new Uint8Array(Number(length[0]));
    this.#read(text, 8);
    try {
      this.header = JSON.parse(new TextDecoder().decode(text));
    } catch (error) {
      throw new Error(`${path} is no safetensors file: ${error.message}`);
    }
    delete this.header.__metadata__;
  }

  has(name) {
    return Object.hasOwn(this.header, name);
  }

  /** Dtype (as ONNX Runtime calls it) and shape of a tensor. */
  describe(name) {
    if (!this.has(name)) throw new Error(`${this.path} has no '${name}'; it has ${Object.keys(this.header).join(", ")}`);
    const { dtype, shape } = this.header[name];
    if (!DTYPES[dtype]) throw new Error(`'${name}' in ${this.path} has dtype ${dtype}, which is not supported here`);
    return { type: DTYPES[dtype][1], shape };
  }

  /** Fill an array with the elements of a tensor, from element `start` on. */
  read(name, array, start = 0) {
    const [begin, end] = this.header[name].data_offsets;
    const from = begin + start * array.BYTES_PER_ELEMENT;
    if (from + array.byteLength > end) throw new Error(`'${name}' in ${this.path} has fewer elements than are wanted`);
    this.#read(array, this.begin + from);
  }

  /** Write a file with the same tensors, their elements taken from arrays by name, whole or not at all. */
  rewrite(path, arrays) {
    const text = Buffer.from(JSON.stringify(this.header));
    const padding = Buffer.alloc((8 - (text.length % 8)) % 8, " ");
    const file = openSync(`${path}.part`, "w");
    let end = 0;
    const put = (bytes, at) => {
      for (let done = 0; done < bytes.length; ) done += writeSync(file, bytes, done, bytes.length - done, at + done);
      end = Math.max(end, at + bytes.length);
    };
    put(new Uint8Array(new BigUint64Array([BigInt(text.length + padding.length)]).buffer), 0);
    put(Buffer.concat([text, padding]), 8);
    const begin = end;
    for (const [name, { data_offsets: [at] }] of Object.entries(this.header)) {
      const { buffer, byteOffset, byteLength } = arrays[name];
      put(new Uint8Array(buffer, byteOffset, byteLength), begin + at);
    }
    closeSync(file);
    renameSync(`${path}.part`, path);
  }

  #read(array, position) {
    const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
    for (let done = 0; done < bytes.length; ) {
      const count = readSync(this.file, bytes, done, bytes.length - done, position + done);
      if (!count) throw new Error(`${this.path} is no safetensors file, or is cut off`);
      done += count;
    }
  }
}
