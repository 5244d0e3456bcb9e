//! Invariants of the architecture: import direction, module docs, no orphan files, banned texts.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a file that cannot be read fails the test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// What each module of the crate may import, beside the leaves that everybody may.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("bisect", &["drive", "report", "run", "scenario", "stats", "target", "validate"]),
    ("compare", &["report", "run", "stats", "validate"]),
    ("device", &[]),
    ("drive", &["scenario", "stats", "validate"]),
    ("engine", &["device"]),
    ("gate", &["report", "run", "scenario", "stats", "validate"]),
    ("hazard", &["device", "engine"]),
    ("plan", &["report", "run", "scenario", "stats"]),
    ("probe", &["device", "engine"]),
    ("report", &["drive", "run", "scenario", "stats", "validate"]),
    ("run", &["drive", "scenario", "stats", "target", "validate"]),
    ("scenario", &[]),
    ("selfcheck", &["drive", "scenario"]),
    ("stats", &[]),
    ("target", &["drive", "scenario"]),
    ("validate", &["scenario"]),
];

/// Modules that anybody may import.
const LEAVES: &[&str] = &["clock", "env", "error", "exit", "seed", "sse"];

/// Modules that import nothing of ours at all, the other leaves included.
const IMPORT_NOTHING: &[&str] = &["clock", "env", "exit", "seed", "sse", "stats"];

/// The virtual GPU must be blind to what it runs: these words may not be imported by it.
const SIM_IS_BLIND_TO: &[&str] = &["crate::hazard", "crate::env", "crate::engine", "crate::probe", "crate::run"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![dir.to_path_buf()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The first path segment of every `crate::…` in `text` outside comments, groups in braces included.
fn crate_imports(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut imports = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with('$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let mut depth = 0;
            let mut segment = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    _ => {}
                }
                if depth == 0 && c == ',' {
                    imports.insert(first_segment(&segment));
                    segment.clear();
                } else {
                    segment.push(c);
                }
            }
            imports.insert(first_segment(&segment));
        } else {
            imports.insert(first_segment(rest));
        }
    }
    imports.remove("");
    imports
}

fn first_segment(path: &str) -> String {
    path.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn module_of(path: &Path) -> String {
    let relative = path.strip_prefix(root().join("src")).unwrap();
    let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

#[test]
fn imports_point_down() {
    let allowed: BTreeMap<_, _> = MAY_IMPORT.iter().copied().collect();
    let modules: BTreeSet<_> = allowed.keys().copied().chain(LEAVES.iter().copied()).collect();
    let mut broken = Vec::new();
    let mut seen = 0;
    for file in sources(&root().join("src")) {
        let module = module_of(&file);
        if matches!(module.as_str(), "lib" | "main" | "cli") {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        for import in crate_imports(&text) {
            if import == module || !modules.contains(import.as_str()) && import != "cli" {
                continue;
            }
            seen += 1;
            let leaf = LEAVES.contains(&import.as_str());
            let ok = if IMPORT_NOTHING.contains(&module.as_str()) {
                false
            } else {
                leaf || allowed.get(module.as_str()).is_some_and(|may| may.contains(&import.as_str()))
            };
            if !ok {
                broken.push(format!("{}: `{module}` may not import `{import}`", file.display()));
            }
        }
    }
    assert!(seen > 20, "only {seen} imports were seen: the reader of this test is broken");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_reader_of_imports_reads_groups_and_paths() {
    let text = "use crate::{\n    error::{Error, Result},\n    seed::Seed,\n};\n// crate::hazard\nlet x = crate::env::var(\"A\");";
    let want: BTreeSet<_> = ["error", "seed", "env"].into_iter().map(str::to_owned).collect();
    assert_eq!(crate_imports(text), want);
}

#[test]
fn the_virtual_gpu_is_blind() {
    for file in sources(&root().join("src/device/sim")) {
        let text = fs::read_to_string(&file).unwrap();
        let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        for word in SIM_IS_BLIND_TO {
            assert!(!code.contains(word), "{} names {word}", file.display());
        }
        assert!(!code.contains("TOOLSTORM_") && !code.contains("SGLANG_"), "{} names a toggle", file.display());
    }
}

#[test]
fn every_module_says_what_it_is() {
    for file in sources(&root().join("src")) {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("//!"), "{} has no module doc", file.display());
    }
}

#[test]
fn no_file_is_an_orphan() {
    for file in sources(&root().join("src")) {
        let name = file.file_stem().unwrap().to_str().unwrap();
        if matches!(name, "lib" | "main") {
            continue;
        }
        let (module, parent_dir) = if name == "mod" {
            let dir = file.parent().unwrap();
            (dir.file_name().unwrap().to_str().unwrap().to_owned(), dir.parent().unwrap().to_path_buf())
        } else {
            (name.to_owned(), file.parent().unwrap().to_path_buf())
        };
        let with_name = parent_dir.with_extension("rs");
        let parents = [parent_dir.join("mod.rs"), parent_dir.join("lib.rs"), with_name];
        let declared = parents.iter().filter_map(|p| fs::read_to_string(p).ok()).any(|text| {
            text.lines().any(|l| l.trim_start().trim_start_matches("pub").contains(&format!("mod {module};")))
        });
        assert!(declared, "{} is declared by no module", file.display());
    }
}

#[test]
fn unsafe_stays_where_it_is_explained() {
    for file in sources(&root().join("src")) {
        let text = fs::read_to_string(&file).unwrap();
        if text.contains("expect(unsafe_code") {
            let path = file.display().to_string();
            assert!(path.contains("src/device/cuda/"), "{path} uses unsafe outside device/cuda");
            assert!(text.contains("//! # Safety") || text.contains("Safety"), "{path} has no safety essay at its head");
        }
        assert!(!text.contains("#[allow(") && !text.contains("#![allow("), "{}: #[allow]", file.display());
    }
}

#[test]
fn every_variable_that_is_read_is_registered() {
    let mut read = Vec::new();
    for file in sources(&root().join("src")) {
        let text = fs::read_to_string(&file).unwrap();
        for (at, opening) in text.match_indices("env::var(\"") {
            read.push(text[at + opening.len()..].chars().take_while(|c| *c != '"').collect::<String>());
        }
    }
    assert!(!read.is_empty(), "the reader of this test is broken");
    let known = |name: &String| toolstorm::env::VARIABLES.iter().any(|variable| variable.name == name);
    let unknown: Vec<_> = read.iter().filter(|name| !known(name)).collect();
    assert!(unknown.is_empty(), "not in env::VARIABLES: {unknown:?}");
}
