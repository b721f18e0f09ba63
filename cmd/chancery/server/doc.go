// Package server owns the certificate authority as a process: its config file, the wiring of authority, endpoint,
// clusters and logs, the admin socket, and the commands `chancery server` and `chancery authority`.
//
// It decides nothing about certificates; ca and csr do. It refuses to start on a config that it would have to guess
// at, to make a root unless it is told to by `authority init` or `chancery dev` (invariant 11), and admin calls of
// anyone but root and its own user (decision D14).
package server
