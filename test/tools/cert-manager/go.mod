module github.com/chancery-project/chancery/test/tools/cert-manager

go 1.27.0

toolchain go1.27.3

// Of the module one file is used, a CustomResourceDefinition; nothing of it is built.
require github.com/cert-manager/cert-manager v1.21.2
