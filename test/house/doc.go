// Package house owns the tests of how the code is laid out: which package may import which, that each says what it
// owns, and that none grows too large to be seen whole. It refuses to be imported.
package house
