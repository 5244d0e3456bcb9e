//! Kernel names for people: the nested name inside a mangled one, and which parameters a signature takes as const.

/// A mangled or demangled kernel name without templates, parameters and anonymous namespaces.
pub(super) fn short_name(name: &str) -> String {
    if let Some(parts) = name.strip_prefix("_ZN").and_then(nested_name) {
        return parts.join("::");
    }
    if let Some((part, _)) = name.strip_prefix("_Z").and_then(source_name) {
        return part.to_owned();
    }
    demangled(name)
}

fn nested_name(mut rest: &str) -> Option<Vec<&str>> {
    let mut parts = Vec::new();
    loop {
        rest = rest.trim_start_matches(['K', 'V', 'r', 'L']);
        match rest.bytes().next()? {
            b'0'..=b'9' => {
                let (part, after) = source_name(rest)?;
                if !part.starts_with("_GLOBAL__N_") {
                    parts.push(part);
                }
                rest = after;
            }
            _ => return (!parts.is_empty()).then_some(parts),
        }
    }
}

/// `<length><identifier>` and what follows.
fn source_name(text: &str) -> Option<(&str, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let length: usize = text[..digits].parse().ok()?;
    let end = digits.checked_add(length)?;
    (length > 0 && text.is_char_boundary(end)).then(|| text.get(digits..end))?.map(|part| (part, &text[end..]))
}

/// The name in a demangled signature: up to its parameters, without template arguments and return type.
fn demangled(text: &str) -> String {
    let mut depth = 0_i32;
    let mut name = String::new();
    for c in text.chars() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            '(' if depth == 0 && !name.ends_with("::") && !name.is_empty() => break,
            c if depth == 0 => name.push(c),
            _ => {}
        }
    }
    let name = name.replace("(anonymous namespace)::", "");
    let last = name.rsplit(' ').find(|word| !word.is_empty()).unwrap_or(text);
    last.to_owned()
}

/// For each parameter of a demangled signature: whether it is a pointer to const.
pub(super) fn const_parameters(signature: &str) -> Vec<bool> {
    let Some(list) = parameter_list(signature) else { return Vec::new() };
    let mut parameters = Vec::new();
    let (mut depth, mut start) = (0_i32, 0);
    for (at, c) in list.char_indices() {
        match c {
            '<' | '(' | '[' | '{' => depth += 1,
            '>' | ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parameters.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parameters.push(&list[start..]);
    parameters.into_iter().map(points_to_const).collect()
}

fn points_to_const(parameter: &str) -> bool {
    let parameter =
        parameter.trim().trim_end_matches("__restrict__").trim_end().trim_end_matches("__restrict").trim_end();
    let Some(pointee) = parameter.trim_end_matches("const").trim_end().strip_suffix('*') else { return false };
    let pointee = pointee.trim();
    pointee.ends_with("const") || pointee.starts_with("const ")
}

/// What stands between the last top-level parentheses.
fn parameter_list(signature: &str) -> Option<&str> {
    let end = signature.rfind(')')?;
    let mut depth = 0_i32;
    for (at, c) in signature[..=end].char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&signature[at + 1..end]);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short() {
        let mangled = "_ZN2at6native53_GLOBAL__N__21739cd4_20_layer_norm_kernel_cu_9c5ada8a28vectorized_layer_norm_kernelIN3c108BFloat16EfLb1EEEviT0_";
        assert_eq!(short_name(mangled), "at::native::vectorized_layer_norm_kernel");
        assert_eq!(short_name("_Z6kernelPfS_"), "kernel");
        assert_eq!(short_name("mqa_logits"), "mqa_logits");
        let signature =
            "void at::native::(anonymous namespace)::vectorized<c10::BFloat16, float>(int, float const*, float*)";
        assert_eq!(short_name(signature), "at::native::vectorized");
        assert_eq!(short_name("_ZN"), "_ZN");
        assert_eq!(short_name("_ZN99short"), "_ZN99short");
    }

    #[test]
    fn const_pointers_are_seen() {
        let signature =
            "void f<int, g<2>>(int, T const*, std::pair<int, float> const*, T*, T const* __restrict__, h(T const*))";
        assert_eq!(const_parameters(signature), [false, true, true, false, true, false]);
        assert_eq!(const_parameters("mqa_logits"), Vec::<bool>::new());
    }
}
