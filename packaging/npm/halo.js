#!/usr/bin/env node
// Runs the program of the package for this platform.
"use strict";

const { spawn } = require("node:child_process");
const path = require("node:path");

const name = `halo-context-${process.platform}-${process.arch}`;
let program;
try {
  program = path.join(path.dirname(require.resolve(`${name}/package.json`)), "bin", "halo");
} catch {
  console.error(`halo: there is no package for ${process.platform} on ${process.arch}; ${name} is missing.`);
  process.exit(1);
}
const child = spawn(program, process.argv.slice(2), { stdio: "inherit" });
// Ctrl-C reaches the program too, which ends in its own time.
process.on("SIGINT", () => {});
for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
child.on("error", (error) => {
  console.error(`halo: ${program} cannot be started: ${error.message}`);
  process.exit(1);
});
child.on("exit", (status) => process.exit(status ?? 1));
