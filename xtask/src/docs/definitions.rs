//! The command lines of programs that nothing else of the gate needs at that point: their definitions are modules of
//! this program too, so that none of them is built for its help text.

use clap::CommandFactory as _;

#[path = "../../../tests/integration/src/bin/kni-bench/options.rs"]
mod bench;
#[path = "../../../tests/integration/src/bin/kni-demo/options.rs"]
mod demo;
#[path = "../../../local-node/src/bin/kni-image/options.rs"]
mod image;
#[path = "../../../tests/integration/src/bin/kni-simulate/options.rs"]
mod simulate;

/// The command lines of `cargo xtask` itself and of the programs whose definitions are here.
pub(super) fn all() -> [clap::Command; 5] {
    [
        crate::Cli::command(),
        bench::Args::command(),
        demo::Args::command(),
        image::Args::command(),
        simulate::Args::command(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_definition_is_consistent_and_has_the_name_of_its_program() {
        let names = all().map(|command| {
            command.clone().debug_assert();
            command.get_name().to_owned()
        });
        assert_eq!(
            names,
            ["cargo xtask", "kni-bench", "kni-demo", "kni-image", "kni-simulate"]
        );
    }
    #[test]
    fn help_texts_are_in_lines() {
        fn check(command: &mut clap::Command) {
            let help = command.render_long_help().to_string();
            super::super::facts::in_lines(command.get_name(), &help).unwrap();
            command.get_subcommands_mut().for_each(check);
        }
        all().iter_mut().for_each(check);
    }
}
