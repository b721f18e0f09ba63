// Package agent owns the node agent as a process: its config file, the joining of a client of the CSR endpoint, a
// keeper of the leaf and a server of SDS and the Workload API, and the command `chancery agent`.
//
// Server, keeper and SDS know nothing of each other: they meet here, in one trust.Identity that is swapped as a whole
// (invariant 6). It refuses callers whose Unix user is not listed.
package agent
