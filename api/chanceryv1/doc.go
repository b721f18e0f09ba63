// Package chanceryv1 holds the native API of Chancery: chancery.proto, issuers.proto and the code generated from it. It refuses to
// hold anything written by hand.
package chanceryv1

//go:generate sh generate.sh
