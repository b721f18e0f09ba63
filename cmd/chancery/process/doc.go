// Package process owns what the commands of chancery have in common towards whoever runs them: how a config file is
// read and what is said when it is wrong, the log, metrics and health over HTTP, the file of addresses, the formats of
// printed output, and how a command ends when it is told to.
//
// It refuses to know what any command does, and anything that only one of them needs. Config files with unknown,
// repeated or misspelt fields are refused, and profiles of the process are shown on loopback only.
package process
