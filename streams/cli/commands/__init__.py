"""The commands: options and help of each. They import what they run when they run, so that help is instant."""
